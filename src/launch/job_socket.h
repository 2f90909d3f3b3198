// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How `deeptide ps` and `deeptide stacks` find a live launcher: a socket whose name is the registry, gone with it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launch/poll_set.h"

namespace deeptide::launch {

/// The launcher's end: an abstract Unix socket "deeptide/UID/PID", answered to the same user (and root) only.
class JobSocket {
 public:
  using Answer = std::function<std::string(const std::string& request)>;  // "ps", "stacks"

  /// Without a socket (no more descriptors, a sandbox) the job is not listed; that is no error.
  explicit JobSocket(Answer answer);
  ~JobSocket();
  JobSocket(const JobSocket&) = delete;
  JobSocket& operator=(const JobSocket&) = delete;

  void add_to(PollSet& set);

 private:
  void serve();

  Answer answer_;
  int fd_ = -1;
};

struct LiveJob {
  std::string id;      // the launcher's process id
  std::string socket;  // its name
};

/// This user's jobs on this machine; for root, everybody's.
std::vector<LiveJob> live_jobs();

/// What the launcher answers; empty if it has ended, or says nothing within `timeout_s`.
std::string ask(const LiveJob& job, const std::string& request, int timeout_s);

}  // namespace deeptide::launch
