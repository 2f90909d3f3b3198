// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals as something to read: children that ended, requests to stop.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <vector>

namespace deeptide::launch {

/// Children that ended, and the signals that ask to stop or to pause.
inline constexpr int kJobSignals[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};

/// Blocks kJobSignals and delivers them through a descriptor. SIGPIPE is ignored.
class SignalFile {
 public:
  /// With `keeper`, requests count only when they come from that process.
  explicit SignalFile(pid_t keeper = 0);
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;

  int fd() const { return fd_; }
  /// What has arrived, in order.
  std::vector<int> read() const;

 private:
  pid_t keeper_;
  int fd_ = -1;
};

}  // namespace deeptide::launch
