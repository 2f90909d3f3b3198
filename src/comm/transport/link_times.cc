// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds up transfers by rank, and finds rates that outliers do not move.
#include "comm/transport/link_times.h"

#include <algorithm>

namespace deeptide::comm {

namespace {

constexpr size_t kKept = 128;         // samples of a link
constexpr size_t kFewest = 24;        // that tell a rate
constexpr double kShortest = 200e-6;  // seconds: below, the wake-ups of threads tell more than the link

constexpr double kSlower = 1.4;    // half the bandwidth was seen as 1.6 and more, even links as 1.25 and less
constexpr double kLateness = 0.1;  // of a step: what others wait for a rank without its being late

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void LinkTimes::add_sent(int to, int64_t bytes) {
  if (near_.contains(to)) return;
  const std::lock_guard lock(mutex_);
  uses_[to].sent_bytes += bytes;
}

void LinkTimes::add_received(int from, int64_t bytes) {
  if (near_.contains(from)) return;
  const std::lock_guard lock(mutex_);
  uses_[from].received_bytes += bytes;
}

void LinkTimes::add_sample(int from, int64_t bytes, double seconds) {
  if (near_.contains(from) || seconds <= 0.0) return;
  const std::lock_guard lock(mutex_);
  Samples& samples = samples_[from];
  const Sample sample{static_cast<double>(bytes), seconds};
  if (samples.ring.size() < kKept) {
    samples.ring.push_back(sample);
  } else {
    samples.ring[samples.next++ % kKept] = sample;
  }
}

/// Returns the sum of the upper part by rate, without the uppermost: there are bursts, and waits that woke up late.
/// Below are rows that shared their way with many others, and processes that stood still.
LinkTimes::Sample LinkTimes::upper_of(std::vector<Sample> samples) {
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.bytes * b.seconds > b.bytes * a.seconds; });
  Sample sum{0.0, 0.0};
  for (size_t i = samples.size() / 16; i < samples.size() * 5 / 8; ++i) {
    sum.bytes += samples[i].bytes;
    sum.seconds += samples[i].seconds;
  }
  return sum;
}

std::map<int, LinkUse> LinkTimes::uses() const {
  const std::lock_guard lock(mutex_);
  return uses_;
}

int64_t LinkTimes::sent_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [rank, use] : uses_) bytes += use.sent_bytes;
  return bytes;
}

LinkFacts LinkTimes::facts() const {
  const std::lock_guard lock(mutex_);
  LinkFacts facts;
  int slowest = -1;
  std::map<int, double> rates;
  for (const auto& [rank, samples] : samples_) {
    if (samples.ring.size() < kFewest) continue;
    const Sample sum = upper_of(samples.ring);
    rates[rank] = sum.bytes / sum.seconds;
    if (slowest >= 0 && rates[rank] >= rates[slowest]) continue;
    slowest = rank;
    const auto counted = static_cast<double>(samples.ring.size() * 5 / 8 - samples.ring.size() / 16);
    facts.slow_from = sum.seconds >= kShortest * counted ? rank : -1;
  }
  if (slowest < 0) return facts;
  facts.rate = static_cast<float>(rates[slowest]);
  std::vector<double> others;
  for (const auto& [rank, rate] : rates) {
    if (rank != slowest) others.push_back(rate);
  }
  facts.rate_of_others = static_cast<float>(median(std::move(others)));
  return facts;
}

std::optional<SlowLink> find_slow_link(const std::vector<LinkFacts>& facts) {
  std::optional<size_t> to;
  for (size_t i = 0; i < facts.size(); ++i) {
    if (facts[i].slow_from >= 0 && (!to || facts[i].rate < facts[*to].rate)) to = i;
  }
  if (!to) return std::nullopt;
  std::vector<double> others;
  for (size_t i = 0; i < facts.size(); ++i) {
    if (i != *to && facts[i].rate > 0) others.push_back(facts[i].rate);
    if (facts[i].rate_of_others > 0) others.push_back(facts[i].rate_of_others);
  }
  const double typical = median(std::move(others));
  if (typical < kSlower * facts[*to].rate) return std::nullopt;
  return SlowLink{*to, typical};
}

std::optional<LateRank> find_late_rank(const std::vector<LinkFacts>& facts, double step_s) {
  if (facts.size() < 2) return std::nullopt;
  size_t late = 0;
  for (size_t i = 1; i < facts.size(); ++i) {
    if (facts[i].computing_s > facts[late].computing_s) late = i;
  }
  std::vector<double> others;
  for (size_t i = 0; i < facts.size(); ++i) {
    if (i != late) others.push_back(facts[i].computing_s);
  }
  const double typical = median(std::move(others));
  if (facts[late].computing_s - typical <= kLateness * step_s) return std::nullopt;
  return LateRank{late, typical};
}

}  // namespace deeptide::comm
