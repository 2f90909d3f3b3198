// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals as something to read: children that ended, requests to stop.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <vector>

namespace deeptide::launch {

/// A keeper passes requests on with this signal, the request's number as its value. A signal of the same number could
/// be lost: the kernel keeps one per number, and the terminal's own, sent to both processes, may still be pending.
inline int passed_on_signal() { return SIGRTMIN; }

/// Blocks SIGCHLD, passed_on_signal() and those that ask to stop or to pause or are the user's own; returns them.
/// Leaves SIGHUP out if it is ignored, as under nohup: blocked, it would be delivered nevertheless.
sigset_t block_job_signals();

/// Blocks the job's signals and delivers them through a descriptor. SIGPIPE is ignored.
class SignalFile {
 public:
  /// With `keeper`, requests count only when that process passes them on, or is gone.
  explicit SignalFile(pid_t keeper = 0);
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;

  int fd() const { return fd_; }
  /// The signals that have arrived, in order.
  std::vector<int> read() const;

 private:
  pid_t keeper_;
  int fd_ = -1;
};

}  // namespace deeptide::launch
