// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies states into memory of their own, and back.
#include "engine/run/rewind.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "deeptide/compression.h"

namespace deeptide::engine {

using at::Tensor;
using zero::OptimizerStates;
using zero::UnitStateBuffer;

Rewind::Rewind(zero::ShardedOptimizer& optimizer, BoundModel& model, LiveModel& live,
               std::shared_ptr<device::Ledger> ledger, int64_t interval)
    : optimizer_(optimizer), model_(model), live_(live), ledger_(std::move(ledger)), interval_(interval) {}

bool Rewind::keep_if_due(const Progress& progress, const Compression* compression) {
  kept_.restored_at = -1;
  if (kept_.at >= 0 && progress.optimizer_steps - kept_.at < interval_) return false;
  const at::NoGradGuard no_grad;
  optimizer_.states().refresh_masters();
  copy_states();
  kept_.buffers.clear();
  for (const NamedTensor& buffer : live_.look().buffers) kept_.buffers.push_back({buffer.name, buffer.tensor.clone()});
  kept_.parameter_steps = optimizer_.counts().uneven_steps();
  kept_.parameter_numbers = optimizer_.counts().parameter_numbers();
  kept_.schedule_iteration = progress.schedule_iteration;
  kept_.at = progress.optimizer_steps;
  kept_.step = progress.global_steps - 1;  // the step that is about to be taken has been counted
  kept_.compression = compression ? compression->add_state("{}") : "";
  return true;
}

Tensor Rewind::allocate(int64_t numel, at::ScalarType dtype) const {
  const bool on_host = optimizer_.states().use_host();
  const auto role = on_host ? device::Role::host_optimizer : device::Role::optimizer;
  return device::allocate_flat(ledger_, role, numel, dtype, on_host ? at::Device(at::kCPU) : model_.device());
}

void Rewind::take_over(const Kept& kept) {
  kept_ = kept;
  for (auto& unit : kept_.states) {
    for (State& state : unit) {
      const Tensor before = std::exchange(state.values, allocate(state.values.numel(), state.values.scalar_type()));
      state.values.copy_(before);
    }
  }
}

void Rewind::copy_states() {
  const OptimizerStates& states = optimizer_.states();
  kept_.states.resize(states.num_units());
  for (int i = 0; i < states.num_units(); ++i) {
    std::vector<State>& kept = kept_.states[i];
    for (const UnitStateBuffer& state : states.buffers(i)) {
      const auto is_this = [&](const State& known) { return known.role == state.role; };
      auto found = std::find_if(kept.begin(), kept.end(), is_this);
      if (found == kept.end()) {
        found = kept.insert(kept.end(), {state.role, allocate(state.data.numel(), state.data.dtype())});
      }
      state.data.copy_to(found->values);
    }
  }
  if (!optimizer_.custom()) return;
  kept_.custom_states.clear();
  for (size_t part = 0; part < optimizer_.custom()->parts().size(); ++part) {
    auto kept = optimizer_.custom()->optimizer().state(part);
    for (PartState& state : kept) state.value = state.value.clone();
    kept_.custom_states.push_back(std::move(kept));
  }
}

bool Rewind::can_restore(const Progress& progress) const {
  return kept_.at >= 0 && kept_.restored_at != progress.optimizer_steps;
}

std::string Rewind::why_not() const {
  if (kept_.at < 0) return "there is no state yet to return to";
  return "no step was applied since the return to the state of step " + std::to_string(kept_.step);
}

/// States that came to be after the copy, such as a momentum, start anew.
int64_t Rewind::restore(Progress& progress) {
  const at::NoGradGuard no_grad;
  OptimizerStates& states = optimizer_.states();
  for (int i = 0; i < states.num_units(); ++i) {
    states.changing(i);
    for (const UnitStateBuffer& state : states.buffers(i)) {
      const auto found = std::find_if(kept_.states[i].begin(), kept_.states[i].end(),
                                      [&](const State& known) { return known.role == state.role; });
      if (found == kept_.states[i].end()) {
        for_each_block(state.data, {0, state.data.numel()},
                       [&](tiers::Block block) { state.data.lease(block, tiers::Access::write).tensor().zero_(); });
      } else {
        state.data.copy_from(found->values);
      }
    }
  }
  for (size_t part = 0; part < kept_.custom_states.size(); ++part) {
    auto state = kept_.custom_states[part];
    for (PartState& entry : state) entry.value = entry.value.clone();
    optimizer_.custom()->optimizer().set_state(part, std::move(state));
  }
  for (const NamedTensor& now : live_.look().buffers) {
    for (const NamedTensor& kept : kept_.buffers) {
      if (kept.name == now.name && kept.tensor.sizes() == now.tensor.sizes()) now.tensor.copy_(kept.tensor);
    }
  }
  optimizer_.counts().set_steps(kept_.at, kept_.parameter_steps);
  optimizer_.counts().set_parameter_numbers(kept_.parameter_numbers);
  progress.optimizer_steps = kept_.restored_at = kept_.at;
  progress.schedule_iteration = kept_.schedule_iteration;
  optimizer_.publish_all();
  for (const auto& unit : model_.units()) unit->forget_external_writes();
  return kept_.step;
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
