// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares what each rank has a copy of, every so many steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/bind/channels.h"
#include "engine/step/boundary.h"
#include "tiers/buffer.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::engine {

/// Guards parameters that lie whole on each rank, and at stage 0 the masters and moments too. What lies once, in shards
/// or in the memory of one host, cannot drift; buffers may differ by design.
class DriftGuard {
 public:
  /// `optimizer`: null for none. All outlive this.
  DriftGuard(Channels& channels, Boundary& boundary, BoundModel& model, zero::ShardedOptimizer* optimizer,
             const RuntimeConfig& config);

  /// Collective, after `enter`. Compares if `step`, of applied ones, is due. Returns the error that `on_drift` "stop"
  /// asks for, on all ranks of all stages alike; else warns, or makes the ranks of a stage equal to its first. Empty:
  /// no error.
  std::string check(int64_t step);
  bool is_due(int64_t step) const;

 private:
  /// Elements of which every rank has a copy, and what they are.
  struct Copy {
    std::string name;  // "'h.0.up.weight'", "exp_avg of 'h.0.up.weight'"
    tiers::Buffer flat;
    tiers::Block range;

    /// The values in place, or unpacked.
    at::Tensor values() const;
  };

  /// Collective over the stage. Does what `check` does for its ranks alone.
  std::string compare(int64_t step);
  std::vector<Copy> copies() const;
  void make_equal(const std::vector<Copy>& copies, const std::vector<size_t>& differing);

  Channels& channels_;
  Boundary& boundary_;
  BoundModel& model_;
  zero::ShardedOptimizer* optimizer_;
  const RuntimeConfig& config_;
};

}  // namespace deeptide::engine
