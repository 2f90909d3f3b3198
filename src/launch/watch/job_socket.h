// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How `deeptide ps` and `deeptide stacks` find a live launcher: the name of its socket is the registry entry, and goes
// with it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// A connected caller that waits for one answer; it gets none if this is destroyed first.
class Caller {
 public:
  explicit Caller(int fd) : fd_(fd) {}
  ~Caller();
  Caller(Caller&& other) noexcept;
  Caller& operator=(Caller&&) = delete;

  void answer(const std::string& text);

 private:
  int fd_;
};

/// The launcher's end: an abstract Unix socket "deeptide/UID/PID", answered to the same user (and root) only.
class JobSocket {
 public:
  using Serve = std::function<void(const std::string& question, Caller caller)>;  // "ps", "stacks"

  /// `job`: the process that the user knows the job by. Without a socket (no more descriptors, a sandbox) the job is
  /// not listed; that is no error.
  JobSocket(pid_t job, Serve serve);
  ~JobSocket();
  JobSocket(const JobSocket&) = delete;
  JobSocket& operator=(const JobSocket&) = delete;

  void add_to(PollSet& set);

 private:
  void accept_one();

  Serve serve_;
  int fd_ = -1;
};

struct LiveJob {
  std::string id;      // the launcher's process id
  std::string socket;  // its name
};

/// This user's jobs on this machine; for root, all users' jobs.
std::vector<LiveJob> live_jobs();

/// The launcher's answer; empty if it has ended, or sends none within `timeout_s`.
std::string ask(const LiveJob& job, const std::string& request, int timeout_s);

}  // namespace deeptide::launch
