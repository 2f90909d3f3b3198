// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets `deeptide ps` and its kin find a live launcher: the name of its socket is the registry entry, and
// vanishes with the launcher.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// A connected caller that waits for one answer. Destruction without an answer closes the connection.
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

/// The launcher's end: an abstract Unix socket "deeptide/UID/PID" that answers only the same user and root.
class JobSocket {
 public:
  using Serve = std::function<void(const std::string& question, Caller caller)>;  // as HangWatch::serve

  /// `job`: the process by which the user knows the job. If no socket can be opened (no descriptors left, a sandbox),
  /// the job is not listed; this is not an error.
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

/// Returns this user's jobs on this machine; for root, the jobs of all users.
std::vector<LiveJob> live_jobs();

/// Returns the job with this id; with an empty one, the only job. Errors: UsageError listing the live jobs.
LiveJob find_job(const std::string& id);

/// Returns the launcher's answer; empty if it has ended or does not answer within `timeout_s`.
std::string ask(const LiveJob& job, const std::string& request, int timeout_s);

}  // namespace deeptide::launch
