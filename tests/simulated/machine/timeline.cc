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
  if (cost.engine != Engine::compute && length > 0) begin = occupy(busy_[engine], begin, length);
  end = begin + length;
  return end;
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

void Timeline::wait(int stream, double time) { stream_end(stream) = std::max(stream_end(stream), time); }

void Timeline::host_wait(double time) { host_ = std::max(host_, time); }

}  // namespace deeptide::simulated
