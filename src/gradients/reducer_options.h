// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How gradients are reduced, as an engine decides it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "gradients/finite_check.h"
#include "gradients/route/route.h"
#include "tiers/offload.h"

namespace deeptide::gradients {

/// Rounds of buckets that wait for a late peer before this rank waits too. A peer in another branch, or in a collective
/// of the program's own, may depend on this rank: it should not wait at once.
inline constexpr size_t kMaxRoundsAhead = 2;

struct ReducerOptions {
  at::ScalarType reduce_dtype = at::kFloat;      // on the wire
  at::ScalarType accumulate_dtype = at::kFloat;  // of sums: of micro-batches in buckets, of ranks in shards
  bool ordered = true;                           // sum by pairs in fp32; false: the transport's own reduction
  /// How many ranks' contributions a host sums before they travel, as summed_together says; 1: each travels. Else
  /// ordered, with an exchange among the ranks of each host.
  int64_t together = 1;
  int bits = 0;              // of an element that travels, 8 or 4, in fp32 buckets and ordered; 0: it travels whole
  bool feedback = false;     // with bits: the error of rounding is added to the next contribution
  bool overlap = true;       // start reductions during backward
  bool reserve = true;       // buffers, of which a rank may run out: it then waits. Not on a device, where the order of
                             // calls alone says how many are in use, and where a wait would be one of later work
  bool side_thread = false;  // sum on a separate thread, for cores that would be idle
  bool keep_rows = false;    // until the step, which sums rows as it reads: no memory for sums
  bool accumulates_whole = false;  // several micro-batches are summed in buckets before they travel
  FiniteCheckTime finite_check = FiniteCheckTime::each_sum;  // each step: nothing is read on the host before
  double scale = 1.0;                                        // 1 / (ranks * accumulation), applied to the sum
  std::vector<double> scales = {};                           // by unit, where each has its own; empty: `scale`
  std::optional<tiers::OffloadOptions> offload = {};         // of sums, to files; then no rows are kept
  /// By unit: how many of this rank's elements of the sum stay in the device's memory, the first ones. The others lie
  /// in files where there is `offload`; else they leave for the host's memory as soon as they are summed. Empty: all
  /// stay. Not with rows that are kept.
  std::vector<int64_t> stays = {};
  std::vector<bool> mostly_zero = {};  // by unit: reduced at the close, by blocks that are not zero; empty: none

  RouteFacts route(int num_ranks, bool shares_memory) const {
    return {num_ranks, shares_memory, ordered, together, keep_rows, reduce_dtype, bits, feedback};
  }
  double scale_of(int unit) const { return scales.empty() ? scale : scales[static_cast<size_t>(unit)]; }
  int64_t stays_of(size_t unit, int64_t numel) const { return stays.empty() ? numel : stays.at(unit); }
  bool is_mostly_zero(size_t unit) const { return !mostly_zero.empty() && mostly_zero[unit]; }
};

}  // namespace deeptide::gradients
