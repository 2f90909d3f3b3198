// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes output to a descriptor whose reader may be slow or gone.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// A queue in front of a file descriptor. A slow reader stalls the ranks' output, but not the launcher that watches
/// them.
class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {}

  void push(std::string_view line) { pending_ += line; }
  /// Writes as much as a ready descriptor takes without blocking: at most PIPE_BUF, whole lines where possible.
  void write_some();
  /// Writes everything or gives up at `deadline`.
  void flush(Clock::time_point deadline);

  int fd() const { return fd_; }
  bool empty() const { return pending_.empty(); }
  bool full() const { return pending_.size() > kFullBytes; }
  bool closed() const { return closed_; }  // the reader is gone; further output is dropped

 private:
  static constexpr size_t kFullBytes = 1 << 20;

  int fd_;
  bool closed_ = false;
  std::string pending_;
};

}  // namespace deeptide::launch
