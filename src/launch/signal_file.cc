// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals as something to read, through signalfd(2).
#include "launch/signal_file.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace deeptide::launch {

SignalFile::SignalFile() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2}) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
}

SignalFile::~SignalFile() { close(fd_); }

std::vector<int> SignalFile::read() const {
  std::vector<int> signals;
  signalfd_siginfo info;
  while (::read(fd_, &info, sizeof(info)) == sizeof(info)) signals.push_back(static_cast<int>(info.ssi_signo));
  return signals;
}

}  // namespace deeptide::launch
