// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Master weights and moments over the units' shards, stepped unit by unit, and the new parameters published to all
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/group.h"
#include "deeptide/config.h"
#include "device/memory.h"
#include "gradients/reducer.h"
#include "sharding/unit.h"
#include "zero/policy.h"

namespace deeptide::zero {

/// A flat state tensor of a unit: "master", "exp_avg", "exp_avg_sq", "momentum". Covers the shard, or, at stage 0, the
/// unit.
struct StateTensor {
  std::string role;
  at::Tensor data;
};

/// Steps trainable units. Holds one set of states a unit; hyper-parameters per group come with each step.
class ShardedOptimizer {
 public:
  ShardedOptimizer(std::vector<sharding::Unit*> units, OptimizerKind kind, const StagePolicy& policy,
                   std::shared_ptr<device::Ledger> ledger, comm::Group& group, at::Device device);

  /// Collective. One step with the reducer's accumulators times `gradient_scale`, then every parameter is in place
  /// again: whole on every rank (stages 0-2), or in the shards, to be gathered when needed (stage 3).
  void step(const gradients::Reducer& reducer, double gradient_scale, const std::vector<Hyperparameters>& groups);
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

  /// Where states begin in the unit: 0 at stage 0, else the shard's beginning. Units: elements.
  int64_t state_begin(int unit) const;
  std::vector<StateTensor> states(int unit) const;
  /// After states were written (load): parameters follow from the masters, on all ranks. Collective.
  void publish_all();
  /// Masters of parameters that others wrote (Parameter::rewritten) follow from them.
  void refresh_masters(int unit);
  void set_step_for_errors(int64_t step) { site_step_ = step; }

 private:
  struct UnitState {
    at::Tensor master;  // aliases the parameters' memory in fp32
    at::Tensor first;   // exp_avg | momentum
    at::Tensor second;  // exp_avg_sq
    bool aliased = false;
  };

  at::Tensor parameters_of(int unit) const;
  /// Each rank steps all: it needs everybody's sums.
  bool gathers_gradients() const { return !policy_.shard_optimizer && group_.size() > 1; }
  at::Tensor whole_gradient(int unit, const at::Tensor& shard);
  void step_unit(int unit, const numerics::Contributions& gradient, double gradient_scale,
                 const std::vector<Hyperparameters>& groups);
  void publish(const std::vector<int>& units);

  std::vector<sharding::Unit*> units_;
  OptimizerKind kind_;
  StagePolicy policy_;
  std::shared_ptr<device::Ledger> ledger_;
  comm::Group& group_;
  device::BufferPool gradient_pool_;
  std::vector<UnitState> states_;
  int64_t steps_ = 0;
  int64_t site_step_ = 0;
};

}  // namespace deeptide::zero
