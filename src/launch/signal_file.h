// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals as something to read: children that ended, requests to stop.
#pragma once

#include <vector>

namespace deeptide::launch {

/// Blocks SIGCHLD and the signals that ask to stop, and delivers them through a descriptor. SIGPIPE is ignored.
class SignalFile {
 public:
  SignalFile();
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;

  int fd() const { return fd_; }
  /// What has arrived, in order.
  std::vector<int> read() const;

 private:
  int fd_ = -1;
};

}  // namespace deeptide::launch
