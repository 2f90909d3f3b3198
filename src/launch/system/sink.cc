// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes whole lines in chunks that a pipe takes atomically.
#include "launch/system/sink.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace deeptide::launch {
namespace {

// Returns the length of the whole lines that fit one atomic write, or PIPE_BUF for a line that is longer.
size_t chunk_size(const std::string& pending) {
  if (pending.size() <= PIPE_BUF) return pending.size();
  const size_t newline = pending.rfind('\n', PIPE_BUF - 1);
  return newline == std::string::npos ? PIPE_BUF : newline + 1;
}

}  // namespace

void Sink::write_some() {
  if (closed_) pending_.clear();
  if (pending_.empty()) return;
  const ssize_t written = ::write(fd_, pending_.data(), chunk_size(pending_));
  if (written > 0) {
    pending_.erase(0, written);
  } else if (written < 0 && errno != EAGAIN && errno != EINTR) {
    closed_ = true;
    pending_.clear();
  }
}

void Sink::flush(Clock::time_point deadline) {
  while (!pending_.empty()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{fd_, POLLOUT, 0};
    if (left <= 0 || poll(&ready, 1, static_cast<int>(std::min<long>(left, INT_MAX))) == 0) return;
    write_some();
  }
}

}  // namespace deeptide::launch
