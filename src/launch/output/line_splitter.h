// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts the ranks' output into prefixed lines that never mix.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <string_view>

#include "launch/system/sink.h"

namespace deeptide::launch {

/// Cuts one stream of a rank into lines, and writes each with its prefix once it is complete.
/// Writes the last state of a line redrawn with '\\r' (a progress bar), and an intermediate state every ten seconds.
class LineSplitter {
 public:
  LineSplitter(std::string prefix, Sink& sink) : prefix_(std::move(prefix)), sink_(sink) {}

  void feed(std::string_view bytes, Clock::time_point now = Clock::now());
  /// Call at the end of the stream: ends an unfinished last line with a newline.
  void finish();

  /// Returns the last lines, oldest first.
  const std::deque<std::string>& tail() const { return tail_; }

 private:
  void redraw(Clock::time_point now);
  void emit();

  std::string prefix_;
  Sink& sink_;
  std::string line_;
  bool redrawn_ = false;  // the next text replaces the line
  Clock::time_point last_shown_{};
  std::deque<std::string> tail_;
};

}  // namespace deeptide::launch
