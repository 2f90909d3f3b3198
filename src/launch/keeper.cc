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

[[noreturn]] void work_in_child(const std::function<int()>& work, pid_t keeper) {
  int code = 1;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  try {
    if (getppid() == keeper) code = work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
  }
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace

int run_kept(const std::function<int()>& work) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t keeper = getpid();
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) work_in_child(work, keeper);
  // Held open, the connection would outlive the agent.
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  for (int asking : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(asking, SIG_IGN);  // the child's matter
  int status = 0;
  for (pid_t ended = 0; ended != child;) {
    ended = waitpid(-1, &status, 0);
    if (ended < 0 && errno != EINTR) return 1;
  }
  kill_children([](int) { return false; });
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
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
