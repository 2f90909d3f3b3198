// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps writes of this rank's operators to sharded parameters that its shards do not show yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "sharding/unit.h"

namespace deeptide::sharding {

/// Ranks reach the same write at different times. Until all have made it, a rank that has not must gather the values
/// from before, so a write stays in the writer's whole buffer. In each round a rank claims how many writes it has made.
/// When all claims are equal, every rank commits what it claimed: it copies its slices into its shards. Not
/// thread-safe: Residency guards it.
class PendingWrites {
 public:
  explicit PendingWrites(std::shared_ptr<device::Ledger> ledger) : ledger_(std::move(ledger)) {}

  /// Stand around an operator that writes `p`, whose unit is whole.
  void begin(Parameter& p);
  void end(Parameter& p, bool succeeded);

  /// Whether the unit's whole buffer has values that exist nowhere else: it must stay.
  bool has(const Unit& unit) const;
  bool empty() const { return entries_.empty(); }
  /// Elements of the units that must stay.
  int64_t numel() const;

  /// Returns the number of writes that await a commit, for the other ranks. -1 while an operator is writing: no claim.
  int32_t claim();
  /// Copies what was last claimed into the shards.
  void commit_claimed();
  /// Copies all that was written: every rank has closed.
  void commit();

 private:
  struct Entry {
    Unit* unit;
    std::vector<Parameter*> claimed;
    std::vector<Parameter*> later;  // written since the claim
    at::Tensor kept;                // (shard,): this rank's slice at the claim, once later writes have changed it
  };

  Entry* find(const Unit& unit);

  std::shared_ptr<device::Ledger> ledger_;
  std::vector<Entry> entries_;
  int32_t writes_ = 0;
  int32_t claimed_ = 0;
  int operators_ = 0;  // that write now
};

}  // namespace deeptide::sharding
