// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Delivers signals through a descriptor: children that ended, requests to stop.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <vector>

namespace deeptide::launch {

/// A keeper forwards a request with this signal and the request's number as its value. A forwarded signal of the
/// original number could be lost: the kernel keeps one pending signal per number, and the terminal sends its own to
/// both processes.
inline int passed_on_signal() { return SIGRTMIN; }

/// Blocks SIGCHLD, passed_on_signal(), the signals that ask to stop or to pause, and the user's own; returns them.
/// Omits SIGHUP if it is ignored, as under nohup: a blocked SIGHUP would be delivered nevertheless.
sigset_t block_job_signals();

/// Blocks the job's signals and delivers them through a descriptor. SIGPIPE is ignored.
class SignalFile {
 public:
  /// With `keeper`, requests count only if that process forwards them or is gone.
  explicit SignalFile(pid_t keeper = 0);
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;

  int fd() const { return fd_; }
  /// Returns the signals that have arrived, in order.
  std::vector<int> read() const;

 private:
  pid_t keeper_;
  int fd_ = -1;
};

}  // namespace deeptide::launch
