// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks' output: lines, prefixes and a queue in front of each descriptor.
#include "launch/output.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace deeptide::launch {
namespace {

constexpr size_t kTailLines = 50;
constexpr size_t kLongestLine = 64 * 1024;  // a longer one is cut, so that binary output cannot fill the memory
constexpr std::chrono::seconds kRedrawInterval{10};

// Whole lines that fit one atomic write, else the beginning of a line that does not.
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

void LineSplitter::feed(std::string_view bytes, Clock::time_point now) {
  for (char c : bytes) {
    if (c == '\n') {
      emit();
    } else if (c == '\r') {
      redraw(now);
    } else {
      if (redrawn_) line_.clear();
      redrawn_ = false;
      line_ += c;
      if (line_.size() >= kLongestLine) emit();
    }
  }
}

void LineSplitter::finish() {
  if (!line_.empty()) emit();
}

void LineSplitter::redraw(Clock::time_point now) {
  if (!line_.empty() && last_shown_ != Clock::time_point{} && now - last_shown_ >= kRedrawInterval) {
    sink_.push(prefix_ + line_ + '\n');
    last_shown_ = now;
  }
  if (last_shown_ == Clock::time_point{}) last_shown_ = now;
  redrawn_ = true;
}

void LineSplitter::emit() {
  sink_.push(prefix_ + line_ + '\n');
  if (tail_.size() == kTailLines) tail_.pop_front();
  tail_.push_back(std::move(line_));
  line_.clear();
  redrawn_ = false;
}

}  // namespace deeptide::launch
