// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts accumulators, rows and buckets.
#include "gradients/forecast.h"

#include <algorithm>

namespace deeptide::gradients {

ReducerForecast forecast(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                         int num_ranks, bool shares_memory) {
  const auto item = static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto sum = static_cast<int64_t>(c10::elementSize(options.accumulate_dtype));
  int64_t sums = 0, round = 0, whole = 0, largest = 0;
  for (const sharding::UnitLayout* unit : units) {
    sums += unit->shard * sum;
    round += unit->numel * item;
    largest = std::max(largest, unit->numel * item);
    if (options.accumulates_whole) whole += unit->numel * sum;
  }
  const bool stay = buckets_stay(options, num_ranks, shares_memory);
  ReducerForecast bytes;
  bytes.gradients = options.keep_rows ? round : sums;
  // One bucket fills while others are under way, each with a send and a receive buffer. In shared memory they are only
  // sent, and one may wait for its last reader. Rows that stay until the step count as gradients.
  size_t buckets = 1;
  if (num_ranks > 1) buckets = (options.keep_rows ? 1 : 2) * (kMaxFlights + 1);
  if (shares_memory) buckets = kMaxOffers + 2;
  bytes.communication = whole + (stay ? 0 : largest * static_cast<int64_t>(buckets));
  if (num_ranks == 1) return bytes;
  // On one side: what is sent, or received, or still unread by other ranks.
  const int64_t late = std::min(static_cast<int64_t>(kMaxRoundsAhead) * round,
                                static_cast<int64_t>(most_ahead(units.size(), shares_memory)) * largest);
  bytes.late_gradients = stay ? 2 * late : options.keep_rows ? late : 0;
  bytes.late_communication = stay ? 0 : options.keep_rows ? late : 2 * late;
  return bytes;
}

}  // namespace deeptide::gradients
