// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads signals through signalfd(2).
#include "launch/system/signal_file.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace deeptide::launch {

sigset_t block_job_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2, passed_on_signal()})
    sigaddset(&set, signal);
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  return set;
}

SignalFile::SignalFile(pid_t keeper) : keeper_(keeper) {
  const sigset_t set = block_job_signals();
  signal(SIGPIPE, SIG_IGN);
  fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
}

SignalFile::~SignalFile() { close(fd_); }

std::vector<int> SignalFile::read() const {
  std::vector<int> signals;
  signalfd_siginfo info;
  while (::read(fd_, &info, sizeof(info)) == sizeof(info)) {
    const auto signal = static_cast<int>(info.ssi_signo);
    if (signal == passed_on_signal()) {
      if (static_cast<pid_t>(info.ssi_pid) == keeper_) signals.push_back(info.ssi_int);
    } else if (signal == SIGCHLD || keeper_ == 0 || getppid() != keeper_) {
      signals.push_back(signal);
    }
  }
  return signals;
}

}  // namespace deeptide::launch
