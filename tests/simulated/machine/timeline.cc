// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds up the lengths of tasks along streams, engines and waits.
#include "simulated/machine/timeline.h"

#include <algorithm>

namespace deeptide::simulated {

double& Timeline::stream_end(int stream) {
  const auto index = static_cast<size_t>(stream);
  if (ends_.size() <= index) ends_.resize(index + 1, 0);
  return ends_[index];
}

double Timeline::add(int stream, const Cost& cost) {
  const auto engine = static_cast<size_t>(cost.engine);
  const double transfer = bandwidths_[engine] > 0 ? static_cast<double>(cost.bytes) / bandwidths_[engine] : 0;
  const double length = cost.seconds + transfer;
  double& end = stream_end(stream);
  double begin = std::max(end, host_);
  double* const before = begun(stream);
  if (before != nullptr) begin = std::max(begin, *before);
  if (cost.engine != Engine::compute && length > 0) begin = occupy(busy_[engine], begin, length);
  end = begin + length;
  if (before != nullptr) *before = begin;
  return end;
}

/// Null: the stream shares no queue.
double* Timeline::begun(int stream) {
  return begun_.empty() ? nullptr : &begun_[static_cast<size_t>(stream) % begun_.size()];
}

/// Takes the first time from `begin` on that is free. What was issued before but is ready later comes later.
double Timeline::occupy(Spans& busy, double begin, double length) const {
  std::erase_if(busy, [this](const Span& span) { return span.end <= host_; });
  auto next = busy.begin();
  for (; next != busy.end() && begin + length > next->begin; ++next) begin = std::max(begin, next->end);
  busy.insert(next, {begin, begin + length});
  return begin;
}

double Timeline::end_of(int stream) { return std::max(stream_end(stream), host_); }

void Timeline::wait(int stream, double time) {
  double& end = stream_end(stream);
  end = std::max(end, time);
  if (double* const before = begun(stream)) *before = std::max(*before, end);
}

void Timeline::host_wait(double time) { host_ = std::max(host_, time); }

}  // namespace deeptide::simulated
