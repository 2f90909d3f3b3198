// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts accumulators, rows and buckets.
#include "gradients/forecast.h"

#include <algorithm>
#include <deque>

#include "device/memory.h"

namespace deeptide::gradients {

namespace {

/// Returns what a pool allocates for the units' buckets, `in_use` of them at once, over two rounds of backward. How
/// many are in use varies, and more of them may be reused the fewer there are, but not always.
int64_t pool_bytes(const std::vector<int64_t>& buckets, size_t in_use) {
  int64_t most = 0;
  for (size_t window = 1; window <= in_use; ++window) {
    device::PoolForecast pool(kMaxBucketWaste);
    std::deque<int64_t> taken;
    for (size_t i = 0; i < 2 * buckets.size(); ++i) {
      if (taken.size() == window) {
        pool.put(taken.front());
        taken.pop_front();
      }
      taken.push_back(pool.take(buckets[buckets.size() - 1 - i % buckets.size()]));
    }
    most = std::max(most, pool.peak());
  }
  return most;
}

}  // namespace

ReducerForecast forecast(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                         int num_ranks, bool shares_memory) {
  const auto item = static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto sum = static_cast<int64_t>(c10::elementSize(options.accumulate_dtype));
  int64_t sums = 0, round = 0, whole = 0, largest = 0;
  tiers::Split split(options.offload ? options.offload->ratio : 0.0);
  std::vector<int64_t> sizes;
  for (const sharding::UnitLayout* unit : units) {
    sums += split.resident(unit->shard, options.accumulate_dtype) * sum;
    sizes.push_back(unit->numel * item);
    round += sizes.back();
    largest = std::max(largest, sizes.back());
    if (options.accumulates_whole) whole += unit->numel * sum;
  }
  const bool stay = buckets_stay(options, num_ranks, shares_memory);
  ReducerForecast bytes;
  bytes.gradients = options.keep_rows ? round : sums;
  bytes.gradients_in_files = split.bytes_in_files();
  if (options.offload) bytes.gradients += options.offload->num_slots * tiers::kSwapBlockBytes;
  // One bucket fills while others are under way, each with a send and a receive buffer. In shared memory they are only
  // sent, and one may wait for its last reader. Rows that stay until the step count as gradients.
  const size_t in_use = shares_memory ? kMaxOffers + 2 : num_ranks > 1 ? kMaxFlights + 1 : 1;
  const int64_t sides = num_ranks > 1 && !shares_memory && !options.keep_rows ? 2 : 1;
  bytes.communication = whole + (stay ? 0 : sides * pool_bytes(sizes, in_use));
  if (num_ranks == 1) return bytes;
  // On one side: what is sent, or received, or still unread by other ranks.
  const int64_t late = std::min(static_cast<int64_t>(kMaxRoundsAhead) * round,
                                static_cast<int64_t>(most_ahead(units.size(), shares_memory)) * largest);
  bytes.late_gradients = stay ? 2 * late : options.keep_rows ? late : 0;
  bytes.late_communication = stay ? 0 : options.keep_rows ? late : 2 * late;
  return bytes;
}

}  // namespace deeptide::gradients
