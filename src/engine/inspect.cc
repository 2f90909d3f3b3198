// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Inspects state: whole parameters, optimizer states and gradients by name.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "engine/engine_impl.h"

namespace deeptide {

using at::Tensor;
using comm::Call;
using sharding::Parameter;

std::vector<NamedTensor> Engine::Impl::module_state_dict() {
  at::NoGradGuard no_grad;
  model.check_bound();
  boundary->enter({.call = Call::gather_state});
  std::vector<NamedTensor> state;
  for (const auto& unit : model.units()) {
    Tensor whole = unit->whole();
    if (unit->memory() == sharding::UnitMemory::sharded) {
      whole =
          device::allocate_flat(ledger, device::Role::gathered, unit->numel(), unit->layout().dtype, model.device());
      gather(whole, unit->shard(), "unit '" + unit->layout().name + "'");
    }
    for (const Parameter& p : unit->parameters()) {
      const Tensor copy = p.view_of(whole).clone().cpu();
      state.push_back({p.name, copy});
      for (const auto& alias : p.aliases) state.push_back({alias, copy});
    }
  }
  for (const NamedTensor& buffer : model.buffers()) {
    state.push_back({buffer.name, buffer.tensor.detach().clone().cpu()});
  }
  return state;
}

Tensor Engine::Impl::full_state(const std::string& name, const std::string& role) {
  at::NoGradGuard no_grad;
  const Parameter* p = model.find(name);
  TORCH_CHECK_VALUE(p != nullptr, "the model has no parameter '", name, "'");
  const auto closes = boundary->enter({.call = Call::gather_state, .rounds = reducer ? reducer->rounds_wanted() : 0});
  if (role == "gradient" && reducer) reducer->finish(engine::most_rounds(closes));  // also what is left in buckets
  const auto trainable = model.trainable();
  const auto place = std::find(trainable.begin(), trainable.end(), p->unit);
  if (!optimizer || place == trainable.end()) return {};
  const int u = static_cast<int>(place - trainable.begin());
  Tensor mine;
  if (role == "gradient" && reducer->has_gradient()) mine = reducer->gradient(u).sum();
  for (const auto& state : optimizer->states(u)) {
    if (state.role == role) mine = state.data.copy();
  }
  if (!mine.defined()) return {};
  Tensor whole = mine;
  if (mine.numel() != p->unit->numel()) {
    whole = at::empty({p->unit->numel()}, mine.options());
    gather(whole, mine, role + " of '" + name + "'");
  }
  return p->view_of(whole).clone().cpu();
}

void Engine::Impl::gather(const Tensor& whole, const Tensor& shard, const std::string& what) {
  auto& gathers = channels.gathers();
  auto pending = gathers.all_gather(whole, shard);
  gathers.wait(pending, {"checkpoint", "gathering " + what});
}

}  // namespace deeptide
