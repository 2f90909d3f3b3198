// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The keeper: a subreaper, so that orphans come to it instead of going to init.
#include "launch/keeper.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace deeptide::launch {
namespace {

std::vector<int> children() {
  std::vector<int> pids;
  std::ifstream list("/proc/self/task/" + std::to_string(getpid()) + "/children");
  for (int pid = 0; list >> pid;) pids.push_back(pid);
  return pids;
}

sigset_t asking_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) sigaddset(&set, signal);
  return set;
}

[[noreturn]] void work_in_child(const std::function<int()>& work, pid_t keeper, bool own_group) {
  int code = 1;
  if (own_group) setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  try {
    if (getppid() == keeper) code = work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
  }
  std::fflush(nullptr);
  _exit(code);
}

// Reaps orphans too. The wait status of `child`; nothing if it cannot be waited for.
std::optional<int> wait_for(pid_t child) {
  for (int status = 0;;) {
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended == child) return status;
    if (ended < 0 && errno != EINTR) return std::nullopt;
  }
}

// The same, passing on what comes here meanwhile. `signals` and SIGCHLD are blocked.
std::optional<int> pass_on_until_end(pid_t child, sigset_t signals) {
  sigaddset(&signals, SIGCHLD);
  while (true) {
    const int signal = sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) kill(child, signal);
    int status = 0;
    for (pid_t ended = 1; ended > 0;) {
      ended = waitpid(-1, &status, WNOHANG);
      if (ended == child) return status;
      if (ended < 0 && errno != EINTR) return std::nullopt;
    }
  }
}

}  // namespace

int run_kept(const std::function<int()>& work, bool pass_on) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t keeper = getpid();
  const sigset_t signals = asking_signals();
  if (pass_on) {
    sigset_t blocked = signals;  // from before the fork: what comes in between is not lost
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, nullptr);
  }
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) work_in_child(work, keeper, pass_on);
  // Held open, the connection would outlive the agent.
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  for (int asking : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    if (!pass_on) signal(asking, SIG_IGN);  // the child's matter
  }
  const std::optional<int> status = pass_on ? pass_on_until_end(child, signals) : wait_for(child);
  kill_children([](int) { return false; });
  if (!status) return 1;
  return WIFSIGNALED(*status) ? 128 + WTERMSIG(*status) : WEXITSTATUS(*status);
}

void kill_children(const std::function<bool(int pid)>& spared) {
  for (bool found = true; found;) {
    found = false;
    for (int pid : children()) {
      if (spared(pid)) continue;
      found = true;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);  // its own children come to us, for the next round
    }
  }
}

}  // namespace deeptide::launch
