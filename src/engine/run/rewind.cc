// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies states into memory of their own, and back.
#include "engine/run/rewind.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace deeptide::engine {

using at::Tensor;
using zero::OptimizerStates;
using zero::UnitStateBuffer;

Rewind::Rewind(zero::ShardedOptimizer& optimizer, BoundModel& model, LiveModel& live,
               std::shared_ptr<device::Ledger> ledger, int64_t interval)
    : optimizer_(optimizer), model_(model), live_(live), ledger_(std::move(ledger)), interval_(interval) {}

void Rewind::keep_if_due(const Progress& progress) {
  restored_at_ = -1;
  if (kept_at_ >= 0 && progress.optimizer_steps - kept_at_ < interval_) return;
  const at::NoGradGuard no_grad;
  optimizer_.states().refresh_masters();
  copy_states();
  buffers_.clear();
  for (const NamedTensor& buffer : live_.look().buffers) buffers_.push_back({buffer.name, buffer.tensor.clone()});
  parameter_steps_ = optimizer_.counts().uneven_steps();
  parameter_numbers_ = optimizer_.counts().parameter_numbers();
  schedule_iteration_ = progress.schedule_iteration;
  kept_at_ = progress.optimizer_steps;
  step_ = progress.global_steps - 1;  // the step that is about to be taken has been counted
}

void Rewind::copy_states() {
  const OptimizerStates& states = optimizer_.states();
  states_.resize(states.num_units());
  for (int i = 0; i < states.num_units(); ++i) {
    std::vector<State>& kept = states_[i];
    for (const UnitStateBuffer& state : states.buffers(i)) {
      const auto is_this = [&](const State& known) { return known.role == state.role; };
      auto found = std::find_if(kept.begin(), kept.end(), is_this);
      if (found == kept.end()) {
        // A copy lies where the states do, or, of those in two places, on the host.
        const auto role = states.use_host() ? device::Role::host_optimizer : device::Role::optimizer;
        const at::Device device = states.use_host() ? at::Device(at::kCPU) : model_.device();
        Tensor copy = device::allocate_flat(ledger_, role, state.data.numel(), state.data.dtype(), device);
        found = kept.insert(kept.end(), {state.role, std::move(copy)});
      }
      state.data.copy_to(found->values);
    }
  }
  if (!optimizer_.custom()) return;
  custom_states_.clear();
  for (size_t part = 0; part < optimizer_.custom()->parts().size(); ++part) {
    auto kept = optimizer_.custom()->optimizer().state(part);
    for (PartState& state : kept) state.value = state.value.clone();
    custom_states_.push_back(std::move(kept));
  }
}

bool Rewind::can_restore(const Progress& progress) const {
  return kept_at_ >= 0 && restored_at_ != progress.optimizer_steps;
}

std::string Rewind::why_not() const {
  if (kept_at_ < 0) return "there is no state yet to return to";
  return "no step was applied since the return to the state of step " + std::to_string(step_);
}

/// States that came to be after the copy, such as a momentum, start anew.
int64_t Rewind::restore(Progress& progress) {
  const at::NoGradGuard no_grad;
  OptimizerStates& states = optimizer_.states();
  for (int i = 0; i < states.num_units(); ++i) {
    states.changing(i);
    for (const UnitStateBuffer& state : states.buffers(i)) {
      const auto found = std::find_if(states_[i].begin(), states_[i].end(),
                                      [&](const State& known) { return known.role == state.role; });
      if (found == states_[i].end()) {
        for_each_block(state.data, {0, state.data.numel()},
                       [&](tiers::Block block) { state.data.lease(block, tiers::Access::write).tensor().zero_(); });
      } else {
        state.data.copy_from(found->values);
      }
    }
  }
  for (size_t part = 0; part < custom_states_.size(); ++part) {
    auto state = custom_states_[part];
    for (PartState& entry : state) entry.value = entry.value.clone();
    optimizer_.custom()->optimizer().set_state(part, std::move(state));
  }
  for (const NamedTensor& now : live_.look().buffers) {
    for (const NamedTensor& kept : buffers_) {
      if (kept.name == now.name && kept.tensor.sizes() == now.tensor.sizes()) now.tensor.copy_(kept.tensor);
    }
  }
  optimizer_.counts().set_steps(kept_at_, parameter_steps_);
  optimizer_.counts().set_parameter_numbers(parameter_numbers_);
  progress.optimizer_steps = restored_at_ = kept_at_;
  progress.schedule_iteration = schedule_iteration_;
  optimizer_.publish_all();
  for (const auto& unit : model_.units()) unit->forget_external_writes();
  return step_;
}

int64_t Rewind::predicted_bytes() const {
  int64_t bytes = 0;
  const OptimizerStates& states = optimizer_.states();
  for (int i = 0; i < states.num_units(); ++i) {
    for (const UnitStateBuffer& state : states.buffers(i)) {
      bytes += state.data.numel() * static_cast<int64_t>(c10::elementSize(state.data.dtype()));
    }
  }
  return bytes;
}

}  // namespace deeptide::engine
