// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Chooses what a step is made by, then the all-gathers that publish.
#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <numeric>

#include "zero/steps/rule_step.h"

namespace deeptide::zero {

using at::Tensor;
using device::Role;
using sharding::Unit;

namespace {

StatePlacement resident_on(const std::shared_ptr<device::Ledger>& ledger, at::Device device) {
  return [ledger, device](int64_t numel, int64_t, at::ScalarType dtype) {
    return tiers::Buffer::resident(device::allocate_flat(ledger, Role::optimizer, numel, dtype, device));
  };
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(std::vector<Unit*> units, const optim::Rule& rule,
                                   const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                                   std::shared_ptr<device::Ledger> ledger, comm::TeamGroups teams, at::Device device,
                                   StatePlacement place, CustomOptimizer* custom, StateTypes types)
    : units_(std::move(units)),
      policy_(policy),
      teams_(std::move(teams)),
      states_(units_, rule, groups, policy, place ? std::move(place) : resident_on(ledger, device), types,
              resident_on(ledger, device)),
      counts_(units_, rule),
      segments_(states_),
      publisher_(states_, policy, ledger, device),
      pool_(ledger, Role::communication, device),
      tools_{states_, counts_, segments_, publisher_, policy_, teams_, device, pool_, exchange_, host_directions_} {
  const bool passes = types.uses_host() && !custom;
  if (passes) {
    exchange_ = std::make_unique<HostExchange>(ledger, device, states_.largest_on_host(),
                                               /*takes_gradients=*/!types.gradients_leave);
  }
  if (const int64_t numel = passes ? states_.largest_of_matrices(groups) : 0; numel > 0) {
    host_directions_ = device::allocate_flat(ledger, Role::host_optimizer, numel, at::kBFloat16, at::kCPU);
  }
  const bool whole = !policy_.shard_optimizer || teams_.whole().size() == 1;  // elsewhere the engine refuses such rules
  if (whole && rule.compressed()) signs_ = std::make_unique<SignSteps>(tools_, ledger);
  if (custom) custom_ = std::make_unique<CustomSteps>(states_, *custom, types.gradients_leave, std::move(ledger));
}

void ShardedOptimizer::step(gradients::Reducer& reducer, double gradient_scale,
                            const std::vector<Hyperparameters>& groups, const ActiveParameters& active) {
  at::NoGradGuard no_grad;
  states().keep(groups);
  counts_.count_step();
  Publication publication(teams_, arrivals_, residency_);
  const StepInput input{gradient_scale, groups, active};
  if (custom_) {
    step_by_caller(reducer, input, publication);
  } else if (reducer.is_local()) {
    signs_->step(reducer, input);
  } else {
    RuleStep(tools_, reducer, input, publication).run();
  }
  for (int i = 0; i < states_.num_units(); ++i) {
    units_[i]->shard().write_behind();
    for (size_t p = 0; p < units_[i]->parameters().size(); ++p) {
      if (active.has(i, static_cast<int>(p))) units_[i]->count_write(units_[i]->parameters()[p]);
    }
  }
  publication.finish();
}

/// The sums hold the scaled gradients afterwards; they are dropped after a step.
void ShardedOptimizer::step_by_caller(const gradients::Reducer& reducer, const StepInput& input,
                                      Publication& publication) {
  const bool gathers_all = tools_.gathers_gradients();
  std::vector<Tensor> gradients, for_caller;
  WholeGradients gathers(states_, teams_, pool_, reducer);
  for (int i = 0; i < states_.num_units(); ++i) {
    states_.changing(i);
    states_.refresh_masters(i);
    const bool moves = !counts_.count_step(i, input.active, input.groups).empty();
    Tensor gradient;
    if (moves && !gathers_all) gradient = reducer.gradient(i).sum_where_stepped();
    if (moves && gathers_all) {
      gathers.start(i);
      gradient = gathers.wait_first();
    }
    if (moves && input.gradient_scale != 1.0) gradient.mul_(input.gradient_scale);
    for_caller.push_back(gradient.defined() ? custom_->beside_master(i, gradient) : gradient);
    gradients.push_back(std::move(gradient));
  }
  custom_->step(for_caller, input.groups, input.active);
  for (int i = 0; i < states_.num_units(); ++i) {
    publisher_.narrow(i);
    if (gathers_all && gradients[i].defined()) pool_.put(std::move(gradients[i]));
    publisher_.add(i, publication);
  }
}

void ShardedOptimizer::publish_all(const comm::TeamGroups& over) {
  std::vector<int> all(units_.size());
  std::iota(all.begin(), all.end(), 0);
  publish_masters(all, over);
  if (signs_) signs_->exchange().reset();
  for (sharding::Unit* unit : units_) {
    for (sharding::Parameter& p : unit->parameters()) unit->count_write(p);
  }
}

/// A graph that saved another parameter of the unit stays valid: only this one counts as written.
void ShardedOptimizer::publish_parameter(int unit, int parameter, const comm::TeamGroups& over) {
  publish_masters({unit}, over);
  units_[unit]->count_write(units_[unit]->parameters()[parameter]);
}

void ShardedOptimizer::publish_masters(const std::vector<int>& units, const comm::TeamGroups& over) {
  at::NoGradGuard no_grad;
  Publication publication(over);
  for (const int i : units) {
    publisher_.narrow(i);
    publication.add(*units_[i]);
  }
  publication.finish();
}

}  // namespace deeptide::zero
