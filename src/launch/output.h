// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks' output: cut into lines, prefixed, and written so that lines never mix.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <string_view>

#include "launch/poll_set.h"

namespace deeptide::launch {

/// Where lines go: a queue in front of a file descriptor, so that a slow reader stops the ranks' output and not the
/// launcher's watch over them.
class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {}

  void push(std::string_view line) { pending_ += line; }
  /// Writes what a ready descriptor takes without blocking: at most PIPE_BUF, ending with a line where it can.
  void write_some();
  /// Writes everything or gives up at `deadline`.
  void flush(Clock::time_point deadline);

  int fd() const { return fd_; }
  bool empty() const { return pending_.empty(); }
  bool full() const { return pending_.size() > kFullBytes; }
  bool closed() const { return closed_; }  // nobody reads any more; what is pushed is dropped

 private:
  static constexpr size_t kFullBytes = 1 << 20;

  int fd_;
  bool closed_ = false;
  std::string pending_;
};

/// Cuts one stream of a rank into lines, each written with its prefix once it is complete.
/// A line redrawn with '\\r' (a progress bar) shows its last state, and what it shows meanwhile every ten seconds.
class LineSplitter {
 public:
  LineSplitter(std::string prefix, Sink& sink) : prefix_(std::move(prefix)), sink_(sink) {}

  void feed(std::string_view bytes, Clock::time_point now = Clock::now());
  /// The stream has ended: an unfinished last line gets its newline.
  void finish();

  /// The last lines seen, oldest first.
  const std::deque<std::string>& tail() const { return tail_; }

 private:
  void redraw(Clock::time_point now);
  void emit();

  std::string prefix_;
  Sink& sink_;
  std::string line_;
  bool redrawn_ = false;  // the line's text will be replaced by what follows
  Clock::time_point last_shown_{};
  std::deque<std::string> tail_;
};

}  // namespace deeptide::launch
