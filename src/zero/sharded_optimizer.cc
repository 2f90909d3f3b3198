// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One kernel call per segment of each shard, then the all-gathers that publish.
#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "optim/kernels.h"

namespace deeptide::zero {

using at::Tensor;
using device::Role;
using sharding::Unit;

ShardedOptimizer::ShardedOptimizer(std::vector<Unit*> units, OptimizerKind kind, const StagePolicy& policy,
                                   std::shared_ptr<device::Ledger> ledger, comm::Group& group, at::Device device)
    : units_(std::move(units)),
      kind_(kind),
      policy_(policy),
      ledger_(std::move(ledger)),
      group_(group),
      gradient_pool_(ledger_, Role::communication, device) {
  if (kind_ == OptimizerKind::none) return;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < units_.size(); ++i) {
    const Tensor parameters = parameters_of(static_cast<int>(i));
    const auto allocate = [&] {
      return device::allocate_flat(ledger_, Role::optimizer, parameters.numel(), at::kFloat, device);
    };
    UnitState state;
    state.aliased = parameters.scalar_type() == at::kFloat;
    state.master = state.aliased ? parameters : allocate();
    state.first = allocate();
    if (kind_ == OptimizerKind::adam) state.second = allocate();
    states_.push_back(std::move(state));
    if (!states_.back().aliased) states_.back().master.copy_(parameters);
  }
}

/// The flat parameters that this rank steps: its shard, or at stage 0 the whole unit.
Tensor ShardedOptimizer::parameters_of(int unit) const {
  return policy_.shard_optimizer ? units_[unit]->shard() : units_[unit]->whole();
}

int64_t ShardedOptimizer::state_begin(int unit) const {
  return policy_.shard_optimizer ? units_[unit]->shard_begin() : 0;
}

std::vector<StateTensor> ShardedOptimizer::states(int unit) const {
  if (kind_ == OptimizerKind::none) return {};
  const UnitState& state = states_[unit];
  if (kind_ == OptimizerKind::adam) {
    return {{"master", state.master}, {"exp_avg", state.first}, {"exp_avg_sq", state.second}};
  }
  return {{"master", state.master}, {"momentum", state.first}};
}

/// Masters follow what the program has written, element by element: where a parameter still is what its master rounds
/// to, the master keeps its further bits. So it does not matter how much more than the written elements is reported.
void ShardedOptimizer::refresh_masters(int unit) {
  const Tensor parameters = parameters_of(unit);
  const int64_t begin = state_begin(unit), end = begin + parameters.numel();
  for (sharding::Parameter& p : units_[unit]->parameters()) {
    if (!std::exchange(p.rewritten, false) || states_[unit].aliased) continue;
    const int64_t first = std::max(p.offset, begin);
    const int64_t count = std::min(p.offset + p.numel, end) - first;
    if (count <= 0) continue;
    Tensor master = states_[unit].master.narrow(0, first - begin, count);
    const Tensor written = parameters.narrow(0, first - begin, count);
    master.copy_(at::where(at::eq(master.to(written.scalar_type()), written), master, written.to(at::kFloat)));
  }
}

void ShardedOptimizer::step(const gradients::Reducer& reducer, double gradient_scale,
                            const std::vector<Hyperparameters>& groups) {
  at::NoGradGuard no_grad;
  ++steps_;
  std::vector<int> published;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    refresh_masters(i);
    if (gathers_gradients()) {
      Tensor gradient = whole_gradient(i, reducer.gradient(i).sum());
      step_unit(i, {gradient}, gradient_scale, groups);
      gradient_pool_.put(std::move(gradient));
    } else {
      step_unit(i, reducer.gradient(i), gradient_scale, groups);
    }
    if (policy_.shard_optimizer && !units_[i]->sharded()) published.push_back(i);
  }
  publish(published);
}

Tensor ShardedOptimizer::whole_gradient(int unit, const Tensor& shard) {
  Tensor whole = gradient_pool_.take(units_[unit]->numel(), at::kFloat);
  auto pending = group_.all_gather(whole, shard);
  group_.wait(pending, {site_step_, "step", "gathering gradients of unit '" + units_[unit]->layout().name + "'"});
  return whole;
}

void ShardedOptimizer::step_unit(int unit, const numerics::Contributions& gradient, double gradient_scale,
                                 const std::vector<Hyperparameters>& groups) {
  UnitState& state = states_[unit];
  const Tensor parameters = state.aliased ? Tensor() : parameters_of(unit);
  const int64_t begin = state_begin(unit);
  const int64_t end = begin + state.master.numel();
  for (const auto& segment : units_[unit]->layout().segments) {
    const int64_t first = std::max(segment.begin, begin);
    const int64_t count = std::min(segment.end, end) - first;
    if (count <= 0) continue;
    const auto cut = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first - begin, count) : Tensor(); };
    const Hyperparameters& hyper = groups.at(segment.group);
    if (kind_ == OptimizerKind::adam) {
      optim::adam_step({cut(state.master), cut(state.first), cut(state.second), gradient.narrow(first - begin, count),
                        cut(parameters)},
                       hyper, steps_, gradient_scale);
    } else {
      const Tensor momentum = hyper.momentum != 0.0 ? cut(state.first) : Tensor();
      optim::sgd_step({cut(state.master), momentum, gradient.narrow(first - begin, count), cut(parameters)}, hyper,
                      steps_, gradient_scale);
    }
  }
}

/// Makes the stepped shards whole on all ranks. What lies in shared memory is there once all have written.
void ShardedOptimizer::publish(const std::vector<int>& units) {
  std::vector<std::pair<int, comm::Pending>> gathers;
  bool shared = false;
  for (int i : units) {
    shared = shared || units_[i]->shared();
    if (!units_[i]->shared()) gathers.emplace_back(i, group_.all_gather(units_[i]->whole(), units_[i]->shard()));
  }
  for (auto& [i, pending] : gathers) {
    group_.wait(pending, {site_step_, "step", "publishing unit '" + units_[i]->layout().name + "'"});
  }
  if (shared) group_.barrier({site_step_, "step", "waiting for all ranks to have stepped their shards"});
}

void ShardedOptimizer::publish_all() {
  at::NoGradGuard no_grad;
  std::vector<int> published;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    if (kind_ != OptimizerKind::none && !states_[i].aliased) parameters_of(i).copy_(states_[i].master);
    if (!units_[i]->sharded()) published.push_back(i);
  }
  publish(published);
}

}  // namespace deeptide::zero
