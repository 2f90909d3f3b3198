// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forecasts a Reducer's memory from the layout of its units alone.
#pragma once

#include <cstdint>
#include <vector>

#include "gradients/cpu_sums.h"
#include "gradients/reducer_options.h"
#include "sharding/layout.h"

namespace deeptide::gradients {

/// A bucket beyond the reserved buffers may lie in one so many times its size.
inline constexpr int64_t kMaxBucketWaste = 2;

/// The buffers that a Reducer keeps from the first gradient on. Units: bytes.
struct ReducerBuffers {
  std::vector<int64_t> buckets;   // filled, then sent
  std::vector<int64_t> received;  // arrived
};
ReducerBuffers reserved_buffers(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                                int num_ranks, bool shares_memory);

/// One rank's. Units: bytes.
struct ReducerForecast {
  int64_t gradients = 0;           // accumulators, or the rows kept in their place
  int64_t gradients_in_files = 0;  // accumulators that are not in memory
  int64_t gradients_on_host = 0;   // those of a device in its host's memory
  int64_t communication = 0;       // reserved buffers: enough if ranks keep pace
  int64_t late_gradients = 0;      // at most so many more while another rank is late
  int64_t late_communication = 0;  // likewise
};

/// By unit, which elements of the sums stay on the device; empty: all.
std::vector<CpuSums::Cut> cuts_of(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options);

/// `shares_memory`: buckets lie in memory of all ranks of the world.
ReducerForecast forecast(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                         int num_ranks, bool shares_memory);

/// Whether rows kept until the step live in the buckets rather than in memory of what arrives.
inline bool buckets_stay(const ReducerOptions& options, const RouteForecast& way) {
  return options.keep_rows && way.arriving == 0;
}

/// The most buckets under way that accumulate while another rank is late. At most a quarter of all offers: another rank
/// that is ahead has as many unread, and kept rows add some more.
size_t most_ahead(size_t num_units, const RouteForecast& way);

}  // namespace deeptide::gradients
