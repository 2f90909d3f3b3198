// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Inspects the model: whole parameters and buffers by name.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "engine/bind/agreement.h"
#include "engine/engine_impl.h"
#include "engine/model/pieces.h"
#include "sharding/tensor_slices.h"

namespace deeptide {

using at::Tensor;
using comm::Call;
using sharding::Parameter;

std::vector<NamedTensor> Engine::Impl::module_state_dict(std::optional<int> only_rank) {
  at::NoGradGuard no_grad;
  const auto loose = enter_to_inspect();
  const engine::LiveNames names(loose);
  const bool wanted = only_rank.value_or(channels.world().rank) == channels.world().rank;
  std::vector<NamedTensor> state;
  for (const auto& unit : model.units()) {
    const Tensor whole = gathered(*unit);
    for (const Parameter& p : unit->parameters()) {
      if (!wanted && !design.topology.slices.contains(p.name)) continue;
      const Tensor copy = whole_parameter(p, whole).clone().cpu();
      for (const auto& [name, tensor] : names.of(p)) {
        state.push_back({name, tensor == 0 ? copy : whole_parameter(p, whole, tensor).clone().cpu()});
      }
    }
  }
  if (!wanted) return {};
  for (const NamedTensor& tensor : loose.all()) {
    state.push_back({tensor.name, tensor.tensor.detach().clone().cpu()});
  }
  return state;
}

/// Enters `call` with the model as it is now, on ranks that have changed theirs alike: who gathers a parameter's values
/// for a tie that the others lack waits for ever.
std::pair<std::vector<comm::Close>, engine::LooseTensors> Engine::Impl::enter_alike(
    Call call, const std::function<void(comm::Close&)>& check) {
  engine::LooseTensors loose;
  auto closes = boundary->enter(call, [&](comm::Close& own) {
    own.rounds = reducer ? reducer->rounds_begun() : 0;
    check(own);
    loose = live.look();
    own.changes = engine::digest_of(loose.terms());
  });
  const auto alike = [&](const comm::Close& close) { return close.changes == closes.front().changes; };
  if (!std::all_of(closes.begin(), closes.end(), alike)) {
    engine::check_agreement(channels.control(), loose.terms(),
                            {"checkpoint", "comparing the model's changes with the other ranks"},
                            "Tie or replace a parameter on every rank alike, or undo it. Nothing was changed");
  }
  return {std::move(closes), std::move(loose)};
}

engine::LooseTensors Engine::Impl::enter_to_inspect() {
  engine::LooseTensors loose = enter_alike(Call::gather_state, [](comm::Close&) {}).second;
  // On all ranks: who gathered a view of a sharded parameter alone would wait for ranks that are elsewhere by then.
  for (auto* tensors : {&loose.buffers, &loose.replaced, &loose.added}) {
    for (NamedTensor& tensor : *tensors) tensor.tensor = engine::readable(tensor.tensor);
  }
  return loose;
}

/// Collective. Returns the unit's values (numel,) on every rank.
Tensor Engine::Impl::gathered(const sharding::Unit& unit) {
  if (unit.memory() != sharding::UnitMemory::sharded) return unit.whole();
  Tensor whole =
      device::allocate_flat(ledger, device::Role::gathered, unit.numel(), unit.layout().dtype, model.device());
  gather(unit, whole, unit.shard_for(whole), "unit '" + unit.layout().name + "'");
  return whole;
}

/// Collective over the ranks that share the parameter, if some do. `unit`: its values (numel,).
Tensor Engine::Impl::whole_parameter(const Parameter& p, const Tensor& unit, int tensor) {
  const auto slice = design.topology.slices.find(p.name);
  if (slice == design.topology.slices.end()) return p.view_of(unit, tensor);
  TORCH_CHECK_VALUE(tensor == 0, "'", p.name, "' is a slice of a parameter, and tied to a transposed one");
  return sharding::joined(slice->second, channels.tensor_team()->all_gather(p.view_of(unit), "checkpoint"));
}

void Engine::Impl::gather(const sharding::Unit& unit, const Tensor& whole, const Tensor& shard,
                          const std::string& what) {
  auto& gathers = channels.of(unit.shard_over(), engine::Channels::Purpose::gathers);
  auto pending = gathers.all_gather(whole, shard);
  gathers.wait(pending, {"checkpoint", "gathering " + what});
}

}  // namespace deeptide
