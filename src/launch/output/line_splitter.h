// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks' output: cut into lines, prefixed, and written so that lines never mix.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <string_view>

#include "launch/system/sink.h"

namespace deeptide::launch {

/// Cuts one stream of a rank into lines, each written with its prefix once it is complete.
/// Of a line redrawn with '\\r' (a progress bar) it writes the last state, and an intermediate one every ten seconds.
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
