// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Master weights and moments over the units' shards, stepped unit by unit, and the new parameters published to all
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/group.h"
#include "device/memory.h"
#include "gradients/reducer.h"
#include "optim/rule.h"
#include "sharding/unit.h"
#include "tiers/buffer.h"
#include "zero/policy.h"

namespace deeptide::zero {

/// A flat state of a unit: "master", or one of the rule's roles. Covers the shard, or, at stage 0, the unit.
struct UnitStateBuffer {
  std::string role;
  tiers::Buffer data;
};

/// Makes the zeroed fp32 buffer (numel,) of a state or a master: where states lie is its choice.
using StatePlacement = std::function<tiers::Buffer(int64_t numel)>;

/// The parameters that a step moves: those with a gradient, equal on all ranks.
struct ActiveParameters {
  std::vector<std::vector<bool>> by_unit;  // by unit and parameter; empty: all

  bool has(int unit, int parameter) const { return by_unit.empty() || by_unit[unit][parameter]; }
};

/// Steps trainable units by a rule. Holds the rule's states per unit; each step brings the groups' hyper-parameters.
class ShardedOptimizer {
 public:
  /// `place`: absent: states are resident beside the parameters, and counted in `ledger`.
  /// Errors: ConfigError when the rule's reach is more than elementwise, which is not supported yet.
  ShardedOptimizer(std::vector<sharding::Unit*> units, const optim::Rule& rule,
                   const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                   std::shared_ptr<device::Ledger> ledger, comm::Group& group, at::Device device,
                   StatePlacement place = {});

  /// Collective. One step with the reducer's accumulators times `gradient_scale`, then every parameter is in place
  /// again: whole on every rank (stages 0-2), or in the shards, to be gathered when needed (stage 3). Parameters that
  /// are not `active` keep their values and states.
  void step(const gradients::Reducer& reducer, double gradient_scale, const std::vector<Hyperparameters>& groups,
            const ActiveParameters& active = {});
  int64_t steps() const { return steps_; }
  /// Of parameters that some steps left alone, by name: how many moved them.
  std::map<std::string, int64_t> uneven_steps() const;
  /// `uneven`: as from uneven_steps(); other parameters have taken all `steps`.
  void set_steps(int64_t steps, const std::map<std::string, int64_t>& uneven);
  /// What its states take on this rank.
  int64_t predicted_bytes() const;

  /// Where states begin in the unit: 0 at stage 0, else the shard's beginning. Units: elements.
  int64_t state_begin(int unit) const;
  /// The master, then the states that are kept.
  std::vector<UnitStateBuffer> states(int unit) const;
  /// Allocates, as zeros, the states that these groups need and that no group has needed yet.
  void keep_states(const std::vector<Hyperparameters>& groups);
  /// Sets the states of these roles to zero, as before the first step.
  void zero_states(const std::set<std::string>& roles);
  /// Whether the state of this role of the rule is kept.
  bool keeps(size_t role) const { return kept_[role]; }
  /// States kept per element, besides the master.
  int num_states() const;
  const optim::Rule& rule() const { return rule_; }
  /// After states were written (load): parameters follow from the masters, on all ranks. Collective.
  void publish_all();
  /// Masters of parameters that others wrote (Parameter::rewritten) follow from them.
  void refresh_masters();

 private:
  struct UnitState {
    tiers::Buffer master;               // aliases the parameters' memory in fp32
    std::vector<tiers::Buffer> states;  // by the rule's roles; undefined: not kept
    bool aliased = false;
    std::vector<int64_t> steps;  // by parameter: the steps that moved it
  };
  /// Elements of a unit that one step moves alike: consecutive active parameters of one group and one count of steps.
  struct Run {
    int64_t begin = 0;
    int64_t end = 0;
    int group = 0;
    int64_t steps = 0;
  };

  at::Tensor parameters_of(int unit) const;
  /// Each rank steps all: it needs the sums of all ranks.
  bool gathers_gradients() const { return !policy_.shard_optimizer && group_.size() > 1; }
  at::Tensor whole_gradient(int unit, const at::Tensor& shard);
  void refresh_masters(int unit);
  std::vector<Run> count_step(int unit, const ActiveParameters& active);
  void step_unit(int unit, const numerics::Contributions& gradient, double gradient_scale,
                 const std::vector<Hyperparameters>& groups, const std::vector<Run>& runs);
  void step_segment(UnitState& state, const at::Tensor& parameters, const numerics::Contributions& gradient,
                    tiers::Block range, const Hyperparameters& hyper, const optim::StepTerms& terms);
  void publish(const std::vector<int>& units);

  std::vector<sharding::Unit*> units_;
  const optim::Rule& rule_;
  StagePolicy policy_;
  std::shared_ptr<device::Ledger> ledger_;
  comm::Group& group_;
  device::BufferPool gradient_pool_;
  StatePlacement place_;
  std::vector<bool> kept_;  // by the rule's roles
  std::vector<UnitState> states_;
  int64_t steps_ = 0;
};

}  // namespace deeptide::zero
