// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One kernel call per segment of each shard, then the all-gathers that publish.
#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "deeptide/errors.h"

namespace deeptide::zero {

using at::Tensor;
using device::Role;
using sharding::Unit;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

namespace {

void check_reach(const optim::Rule& rule) {
  if (rule.reach() == optim::Reach::elementwise) return;
  const char* needs = rule.reach() == optim::Reach::parameter_norms ? "sums over each whole parameter"
                                                                    : "each whole parameter as a matrix";
  throw ConfigError("optimizer " + rule.name() + " needs " + needs + ", which shards do not give yet; choose an " +
                    "optimizer whose step is elementwise, such as AdamW");
}

StatePlacement resident_on(const std::shared_ptr<device::Ledger>& ledger, at::Device device) {
  return [ledger, device](int64_t numel) {
    return Buffer::resident(device::allocate_flat(ledger, Role::optimizer, numel, at::kFloat, device));
  };
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(std::vector<Unit*> units, const optim::Rule& rule,
                                   const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                                   std::shared_ptr<device::Ledger> ledger, comm::Group& group, at::Device device,
                                   StatePlacement place)
    : units_(std::move(units)),
      rule_(rule),
      policy_(policy),
      ledger_(std::move(ledger)),
      group_(group),
      gradient_pool_(ledger_, Role::communication, device),
      place_(place ? std::move(place) : resident_on(ledger_, device)),
      kept_(rule.roles().size(), false) {
  check_reach(rule);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < units_.size(); ++i) {
    const Tensor parameters = parameters_of(static_cast<int>(i));
    UnitState state;
    state.aliased = parameters.scalar_type() == at::kFloat;
    state.master = state.aliased ? Buffer::resident(parameters) : place_(parameters.numel());
    state.states.resize(kept_.size());
    state.steps.assign(units_[i]->parameters().size(), 0);
    if (!state.aliased) {
      for_each_block(state.master, {0, parameters.numel()}, [&](Block block) {
        const auto master = state.master.lease(block, Access::write);
        master.tensor().copy_(parameters.narrow(0, block.begin, block.count));
      });
    }
    states_.push_back(std::move(state));
  }
  keep_states(groups);
}

void ShardedOptimizer::keep_states(const std::vector<Hyperparameters>& groups) {
  for (size_t role = 0; role < kept_.size(); ++role) {
    const auto needs = [&](const Hyperparameters& hyper) { return rule_.keeps(role, hyper); };
    if (kept_[role] || std::none_of(groups.begin(), groups.end(), needs)) continue;
    for (UnitState& state : states_) state.states[role] = place_(state.master.numel());
    kept_[role] = true;
  }
}

void ShardedOptimizer::zero_states(const std::set<std::string>& roles) {
  at::NoGradGuard no_grad;
  for (size_t role = 0; role < kept_.size(); ++role) {
    if (!kept_[role] || !roles.contains(rule_.roles()[role].name)) continue;
    for (UnitState& state : states_) {
      Buffer& buffer = state.states[role];
      for_each_block(buffer, {0, buffer.numel()},
                     [&](Block block) { buffer.lease(block, Access::write).tensor().zero_(); });
    }
  }
}

int ShardedOptimizer::num_states() const { return static_cast<int>(std::count(kept_.begin(), kept_.end(), true)); }

/// The flat parameters that this rank steps: its shard, or at stage 0 the whole unit.
Tensor ShardedOptimizer::parameters_of(int unit) const {
  return policy_.shard_optimizer ? units_[unit]->shard() : units_[unit]->whole();
}

int64_t ShardedOptimizer::state_begin(int unit) const {
  return policy_.shard_optimizer ? units_[unit]->shard_begin() : 0;
}

std::vector<UnitStateBuffer> ShardedOptimizer::states(int unit) const {
  const UnitState& state = states_[unit];
  std::vector<UnitStateBuffer> buffers{{"master", state.master}};
  for (size_t role = 0; role < kept_.size(); ++role) {
    if (kept_[role]) buffers.push_back({rule_.roles()[role].name, state.states[role]});
  }
  return buffers;
}

int64_t ShardedOptimizer::predicted_bytes() const {
  int64_t elements = 0;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    const Tensor parameters = parameters_of(i);
    elements += (num_states() + (parameters.scalar_type() == at::kFloat ? 0 : 1)) * parameters.numel();
  }
  return elements * static_cast<int64_t>(sizeof(float));
}

/// Masters follow what the program has written, element by element: where a parameter still is what its master rounds
/// to, the master keeps its extra precision. Over-reporting written elements is therefore harmless.
void ShardedOptimizer::refresh_masters(int unit) {
  const Tensor parameters = parameters_of(unit);
  const int64_t begin = state_begin(unit), end = begin + parameters.numel();
  for (sharding::Parameter& p : units_[unit]->parameters()) {
    if (!std::exchange(p.rewritten, false) || states_[unit].aliased) continue;
    const int64_t first = std::max(p.offset, begin);
    const int64_t count = std::min(p.offset + p.numel, end) - first;
    if (count <= 0) continue;
    const Buffer& buffer = states_[unit].master;
    for_each_block(buffer, {first - begin, count}, [&](Block block) {
      const auto lease = buffer.lease(block, Access::update);
      const Tensor &master = lease.tensor(), written = parameters.narrow(0, block.begin, block.count);
      master.copy_(at::where(at::eq(master.to(written.scalar_type()), written), master, written.to(at::kFloat)));
    });
  }
}

void ShardedOptimizer::refresh_masters() {
  at::NoGradGuard no_grad;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) refresh_masters(i);
}

std::map<std::string, int64_t> ShardedOptimizer::uneven_steps() const {
  std::map<std::string, int64_t> uneven;
  for (size_t i = 0; i < units_.size(); ++i) {
    for (size_t p = 0; p < states_[i].steps.size(); ++p) {
      if (states_[i].steps[p] != steps_) uneven[units_[i]->parameters()[p].name] = states_[i].steps[p];
    }
  }
  return uneven;
}

void ShardedOptimizer::set_steps(int64_t steps, const std::map<std::string, int64_t>& uneven) {
  steps_ = steps;
  for (size_t i = 0; i < units_.size(); ++i) {
    for (size_t p = 0; p < states_[i].steps.size(); ++p) {
      const auto found = uneven.find(units_[i]->parameters()[p].name);
      states_[i].steps[p] = found == uneven.end() ? steps : found->second;
    }
  }
}

/// Counts this step for the unit's active parameters and returns them as runs. The gap after a parameter belongs to it.
std::vector<ShardedOptimizer::Run> ShardedOptimizer::count_step(int unit, const ActiveParameters& active) {
  const auto& parameters = units_[unit]->parameters();
  std::vector<int64_t>& steps = states_[unit].steps;
  std::vector<Run> runs;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (!active.has(unit, static_cast<int>(p))) continue;
    ++steps[p];
    const int64_t begin = parameters[p].offset;
    const int64_t end = p + 1 < parameters.size() ? parameters[p + 1].offset : units_[unit]->numel();
    const bool joins = !runs.empty() && runs.back().end == begin && runs.back().group == parameters[p].group &&
                       runs.back().steps == steps[p];
    if (joins) {
      runs.back().end = end;
    } else {
      runs.push_back({begin, end, parameters[p].group, steps[p]});
    }
  }
  return runs;
}

void ShardedOptimizer::step(const gradients::Reducer& reducer, double gradient_scale,
                            const std::vector<Hyperparameters>& groups, const ActiveParameters& active) {
  at::NoGradGuard no_grad;
  keep_states(groups);
  ++steps_;
  std::vector<int> published;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    refresh_masters(i);
    const auto runs = count_step(i, active);
    if (gathers_gradients() && !runs.empty()) {
      Tensor gradient = whole_gradient(i, reducer.gradient(i).sum());
      step_unit(i, {gradient}, gradient_scale, groups, runs);
      gradient_pool_.put(std::move(gradient));
    } else {
      step_unit(i, reducer.gradient(i), gradient_scale, groups, runs);
    }
    for (size_t p = 0; p < units_[i]->parameters().size(); ++p) {
      if (active.has(i, static_cast<int>(p))) units_[i]->count_write(units_[i]->parameters()[p]);
    }
    if (policy_.shard_optimizer && units_[i]->memory() != sharding::UnitMemory::sharded) published.push_back(i);
  }
  publish(published);
}

Tensor ShardedOptimizer::whole_gradient(int unit, const Tensor& shard) {
  Tensor whole = gradient_pool_.take(units_[unit]->numel(), at::kFloat);
  auto pending = group_.all_gather(whole, shard);
  group_.wait(pending, {"step", "gathering gradients of unit '" + units_[unit]->layout().name + "'"});
  return whole;
}

void ShardedOptimizer::step_unit(int unit, const numerics::Contributions& gradient, double gradient_scale,
                                 const std::vector<Hyperparameters>& groups, const std::vector<Run>& runs) {
  UnitState& state = states_[unit];
  const Tensor parameters = state.aliased ? Tensor() : parameters_of(unit);
  const int64_t begin = state_begin(unit);
  const int64_t end = begin + state.master.numel();
  for (const Run& run : runs) {
    const int64_t first = std::max(run.begin, begin);
    const int64_t count = std::min(run.end, end) - first;
    if (count <= 0) continue;
    step_segment(state, parameters, gradient, {first - begin, count}, groups.at(run.group),
                 {run.steps, gradient_scale});
  }
}

/// Block by block, wherever the states lie: what is resident is one block.
void ShardedOptimizer::step_segment(UnitState& state, const Tensor& parameters, const numerics::Contributions& gradient,
                                    Block range, const Hyperparameters& hyper, const optim::StepTerms& terms) {
  std::vector<const Buffer*> buffers{&state.master};
  for (size_t role = 0; role < kept_.size(); ++role) {
    if (rule_.keeps(role, hyper)) buffers.push_back(&state.states[role]);
  }
  for_each_block(std::span<const Buffer* const>(buffers), range, [&](Block block) {
    const auto master = state.master.lease(block, Access::update);
    std::vector<tiers::Lease> leases(kept_.size());
    std::vector<Tensor> states(kept_.size());
    for (size_t role = 0; role < kept_.size(); ++role) {
      if (!rule_.keeps(role, hyper)) continue;
      leases[role] = state.states[role].lease(block, Access::update);
      states[role] = leases[role].tensor();
    }
    const Tensor rounded = parameters.defined() ? parameters.narrow(0, block.begin, block.count) : Tensor();
    rule_.step({master.tensor(), std::move(states), gradient.narrow(block.begin, block.count), rounded}, hyper, terms);
  });
}

/// Makes the stepped shards whole on all ranks. What lies in shared memory is there once all have written.
void ShardedOptimizer::publish(const std::vector<int>& units) {
  std::vector<std::pair<int, comm::Pending>> gathers;
  bool shared = false;
  for (int i : units) {
    const bool is_shared = units_[i]->memory() == sharding::UnitMemory::shared;
    shared = shared || is_shared;
    if (!is_shared) gathers.emplace_back(i, group_.all_gather(units_[i]->whole(), units_[i]->shard()));
  }
  for (auto& [i, pending] : gathers) {
    group_.wait(pending, {"step", "publishing unit '" + units_[i]->layout().name + "'"});
  }
  if (shared) group_.barrier({"step", "waiting for all ranks to have stepped their shards"});
}

void ShardedOptimizer::publish_all() {
  at::NoGradGuard no_grad;
  std::vector<int> published;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    const Buffer& buffer = states_[i].master;
    const Tensor parameters = parameters_of(i);
    if (!states_[i].aliased) {
      for_each_block(buffer, {0, buffer.numel()}, [&](Block block) {
        const auto master = buffer.lease(block, Access::read);
        parameters.narrow(0, block.begin, block.count).copy_(master.tensor());
      });
    }
    for (sharding::Parameter& p : units_[i]->parameters()) units_[i]->count_write(p);
    if (units_[i]->memory() != sharding::UnitMemory::sharded) published.push_back(i);
  }
  publish(published);
}

}  // namespace deeptide::zero
