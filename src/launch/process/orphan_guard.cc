// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads group ids from a pipe, whose end of file means that the launcher is gone.
#include "launch/process/orphan_guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <system_error>

namespace deeptide::launch {
namespace {

constexpr int kGraceSteps = 100;
constexpr useconds_t kGraceStep_us = 50'000;

struct Message {
  pid_t group;  // negative: released
  bool grace;
};

[[noreturn]] void guard_main(int pipe) {
  setsid();  // out of reach of the terminal and of a kill of the launcher's group
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  prctl(PR_SET_NAME, "deeptide-guard");
  // An open descriptor here would keep readers of the launcher's output waiting.
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  std::map<pid_t, bool> groups;
  for (Message message{};;) {
    const ssize_t got = read(pipe, &message, sizeof(message));
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof(message)) break;
    if (message.group > 0) {
      groups[message.group] = message.grace;
    } else {
      groups.erase(-message.group);
    }
  }
  for (const auto& [group, grace] : groups) {
    for (int step = 0; grace && step < kGraceSteps && kill(-group, 0) == 0; ++step) usleep(kGraceStep_us);
    kill(-group, SIGKILL);
  }
  _exit(0);
}

// A failed write means that the guard was killed; then only the parent-death signal protects.
void send(int pipe, Message message) { [[maybe_unused]] const ssize_t sent = write(pipe, &message, sizeof(message)); }

}  // namespace

OrphanGuard::OrphanGuard() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  pid_ = fork();
  if (pid_ == 0) {
    close(ends[1]);
    guard_main(ends[0]);
  }
  const int error = errno;
  close(ends[0]);
  pipe_ = ends[1];
  if (pid_ < 0) {
    close(pipe_);
    throw std::system_error(error, std::generic_category(), "fork");
  }
}

OrphanGuard::~OrphanGuard() {
  close(pipe_);
  waitpid(pid_, nullptr, 0);
}

void OrphanGuard::watch(pid_t group, bool grace) { send(pipe_, {group, grace}); }

void OrphanGuard::release(pid_t group) { send(pipe_, {-group, false}); }

}  // namespace deeptide::launch
