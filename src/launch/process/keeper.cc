// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes the keeper a subreaper, so that it adopts orphans in place of init.
#include "launch/process/keeper.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "launch/system/report.h"
#include "launch/system/signal_file.h"

namespace deeptide::launch {
namespace {

std::vector<int> children() {
  std::vector<int> pids;
  std::ifstream list("/proc/self/task/" + std::to_string(getpid()) + "/children");
  for (int pid = 0; list >> pid;) pids.push_back(pid);
  return pids;
}

[[noreturn]] void work_in_child(const std::function<int(pid_t)>& work, pid_t keeper, bool own_group) {
  if (own_group) setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const int code = getppid() == keeper ? run_reporting([&] { return work(keeper); }) : kExitCannotStart;
  std::fflush(nullptr);
  _exit(code);
}

pid_t start_child(const std::function<int(pid_t)>& work, bool own_group) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t keeper = getpid();
  std::fflush(nullptr);  // otherwise both processes would write the buffered output
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) work_in_child(work, keeper, own_group);
  return child;
}

int end_of(int status) {
  kill_children([](int) { return false; });
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

int run_kept(const std::function<int()>& work) {
  const pid_t child = start_child([&work](pid_t) { return work(); }, false);
  // An open descriptor here would keep the connection alive after the agent has ended.
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  for (int asking : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(asking, SIG_IGN);  // the child handles them
  int status = 0;
  for (pid_t ended = 0; ended != child;) {
    ended = waitpid(-1, &status, 0);
    if (ended < 0 && errno != EINTR) return 1;
  }
  return end_of(status);
}

int run_kept_job(const std::function<int(pid_t keeper)>& work, bool own_group) {
  const sigset_t awaited = block_job_signals();
  const pid_t child = start_child(work, own_group);
  while (true) {
    const int signal = sigwaitinfo(&awaited, nullptr);
    if (signal > 0 && signal != SIGCHLD && signal != passed_on_signal()) {
      sigqueue(child, passed_on_signal(), sigval{.sival_int = signal});
    }
    int status = 0;
    for (pid_t changed; (changed = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) {
      if (changed != child) continue;  // an orphan has ended
      if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "deeptide: the supervisor was killed by signal %d; its ranks were killed\n",
                     WTERMSIG(status));
      }
      if (!WIFSTOPPED(status)) return end_of(status);
      raise(SIGSTOP);  // the shell waits for this process
      kill(child, SIGCONT);
    }
  }
}

void kill_children(const std::function<bool(int pid)>& spared) {
  for (bool found = true; found;) {
    found = false;
    for (int pid : children()) {
      if (spared(pid)) continue;
      found = true;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);  // this process adopts its children; the next round kills them
    }
  }
}

}  // namespace deeptide::launch
