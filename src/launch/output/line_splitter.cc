// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buffers an unfinished line, which redrawn lines (progress bars) replace.
#include "launch/output/line_splitter.h"

namespace deeptide::launch {
namespace {

constexpr size_t kTailLines = 50;
constexpr size_t kLongestLine = 64 * 1024;  // a longer line is cut, so that binary output cannot fill the memory
constexpr std::chrono::seconds kRedrawInterval{10};

/// Removes "[rank3]: ", with which torch begins each line of an exception that ends a rank.
void drop_rank_of_torch(std::string& line) {
  constexpr std::string_view kBegin = "[rank";
  if (!line.starts_with(kBegin)) return;
  const size_t end = line.find_first_not_of("0123456789", kBegin.size());
  if (end == kBegin.size() || end == std::string::npos || line.compare(end, 2, "]:") != 0) return;
  line.erase(0, end + (line.compare(end, 3, "]: ") == 0 ? 3 : 2));
}

}  // namespace

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
  if (!prefix_.empty()) drop_rank_of_torch(line_);
  sink_.push(prefix_ + line_ + '\n');
  if (tail_.size() == kTailLines) tail_.pop_front();
  tail_.push_back(std::move(line_));
  line_.clear();
  redrawn_ = false;
}

}  // namespace deeptide::launch
