// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Allocates states when a group first needs them, and keeps masters in step with what the program writes.
#include "zero/states/optimizer_states.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/invariant.h"
#include "tiers/joined.h"
#include "tiers/slice.h"

namespace deeptide::zero {

using at::Tensor;
using sharding::Unit;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

namespace {

/// The unit's elements and the gaps between parameters, but not what pads it for a number of ranks.
int64_t extent_of(const sharding::UnitLayout& layout) {
  constexpr int64_t kAlignment = 64;  // elements
  const int64_t end = layout.slots.empty() ? 0 : layout.slots.back().offset + layout.slots.back().numel;
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

/// For the masters of `parameters`. Those of a device lie in its memory.
std::shared_ptr<numerics::HalfwayBits> halfway_bits_of(const Buffer& parameters) {
  const Tensor memory = parameters.in_place();
  const int64_t numel = parameters.numel();
  if (!memory.defined() || memory.is_cpu()) return std::make_shared<numerics::HalfwayBits>(numel);
  return std::make_shared<numerics::HalfwayBits>(at::zeros({(numel + 7) / 8}, memory.options().dtype(at::kByte)));
}

/// A copy of the buffer in `to`, or, if that is undefined, the buffer.
Buffer moved(const Buffer& from, Buffer to) {
  if (!to.defined()) return from;
  const Buffer* const both[] = {&from, &to};
  for_each_block(both, {0, from.numel()}, [&](Block block) {
    const auto source = from.lease(block, Access::read);
    to.lease(block, Access::write).tensor().copy_(source.tensor());
  });
  to.write_behind();
  return to;
}

}  // namespace

OptimizerStates::OptimizerStates(std::vector<Unit*> units, const optim::Rule& rule,
                                 const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                                 StatePlacement place, StateTypes types, StatePlacement beside)
    : units_(std::move(units)),
      rule_(rule),
      policy_(policy),
      place_(std::move(place)),
      beside_(std::move(beside)),
      types_(std::move(types)),
      kept_(groups.size(), std::vector<bool>(rule.roles().size(), false)) {
  at::NoGradGuard no_grad;
  int64_t first = 0;
  for (int i = 0; i < num_units(); ++i) {
    UnitState& state = units_states_.emplace_back();
    place_masters(i);
    state.first = first;
    first += extent_of(units_[i]->layout());
  }
  keep(groups);
}

Buffer OptimizerStates::place(int unit, const StatePart& part, size_t state, at::ScalarType dtype) const {
  const int64_t numel = part.numel();
  if (types_.uses_host() && !part.on_host) return beside_(numel, numel, dtype);
  return place_(numel, types_.in_memory_of(static_cast<size_t>(unit), state, numel), dtype);
}

/// The low halves of a packed master begin as zeros: it is the parameter.
void OptimizerStates::place_masters(int unit) {
  UnitState& state = units_states_[unit];
  const Buffer values = parameters(unit);
  const int64_t numel = values.numel(), on_device = types_.on_device_of(static_cast<size_t>(unit), numel);
  const bool off_device = lies_off_device(*units_[unit]);
  for (const Block range : {Block{0, on_device}, Block{on_device, numel - on_device}}) {
    if (range.count == 0 && !(numel == 0 && state.parts.empty())) continue;
    StatePart& part = state.parts.emplace_back();
    part.begin = range.begin;
    part.count = range.count;
    part.on_host = range.begin >= on_device && types_.uses_host();
    part.leaves = off_device && !part.on_host;
    const bool beside = types_.steps_beside(part.on_host, off_device);
    part.aliased = types_.aliases(values.dtype(), beside);
    part.states.resize(rule_.roles().size());
    const Buffer own = tiers::slice(values, range);
    if (part.aliased) {
      part.master = own;
    } else if (types_.packs(values.dtype(), beside)) {
      state.packed = {place(unit, part, 0, at::kShort), halfway_bits_of(own)};
      part.master = packed_buffer(own, *state.packed);
    } else {
      part.master = place(unit, part, 0, types_.of_masters(values.dtype()));
      const Buffer* const both[] = {&part.master, &own};
      for_each_block(both, {0, range.count}, [&](Block block) {
        const auto master = part.master.lease(block, Access::write);
        master.tensor().copy_(own.lease(block, Access::read).tensor());
      });
    }
  }
  join(state);
}

/// After a buffer of a part has changed.
void OptimizerStates::join(UnitState& state) {
  const StatePart& first = state.parts.front();
  state.master = first.master;
  state.states = first.states;
  if (state.parts.size() == 1) return;
  const StatePart& second = state.parts.back();
  state.master = tiers::joined(first.master, second.master, kSplitNumel);
  for (size_t role = 0; role < first.states.size(); ++role) {
    if (!first.states[role].defined()) continue;
    state.states[role] = tiers::joined(first.states[role], second.states[role], kSplitNumel);
  }
}

bool lies_off_device(const Unit& unit) {
  const bool is_cpu = unit.parameters().front().tensors.front().is_cpu();
  return !is_cpu && unit.memory() == sharding::UnitMemory::sharded && unit.shard().tier() != tiers::Tier::device;
}

Buffer OptimizerStates::parameters(int unit) const {
  return policy_.shard_optimizer ? units_[unit]->shard() : Buffer::resident(units_[unit]->whole());
}

Buffer OptimizerStates::parameters(int unit, const StatePart& part) const {
  return tiers::slice(parameters(unit), {part.begin, part.numel()});
}

const StatePart* OptimizerStates::part_on_host(int unit) const {
  const StatePart& last = units_states_[unit].parts.back();
  return last.on_host ? &last : nullptr;
}

int64_t OptimizerStates::numel() const {
  int64_t numel = 0;
  for (int i = 0; i < num_units(); ++i) numel += master(i).numel();
  return numel;
}

int64_t OptimizerStates::numel_on_host() const {
  int64_t numel = 0;
  for (int i = 0; i < num_units(); ++i) {
    if (const StatePart* part = part_on_host(i)) numel += part->numel();
  }
  return numel;
}

int64_t OptimizerStates::largest_on_host() const {
  int64_t largest = 0;
  for (int i = 0; i < num_units(); ++i) {
    if (const StatePart* part = part_on_host(i)) largest = std::max(largest, part->numel());
  }
  return largest;
}

int64_t OptimizerStates::largest_of_matrices(const std::vector<Hyperparameters>& groups) const {
  int64_t largest = 0;
  for (int i = 0; i < num_units(); ++i) {
    const auto& members = units_[i]->parameters();
    const bool has_matrices = std::any_of(members.begin(), members.end(), [&](const auto& p) {
      return rule_.reach(groups.at(p.group)) == optim::Reach::whole_parameter;
    });
    if (has_matrices) largest = std::max(largest, master(i).numel());
  }
  return largest;
}

std::optional<int64_t> OptimizerStates::narrowed_bytes() const {
  std::optional<int64_t> largest;
  for (int i = 0; i < num_units(); ++i) {
    const StatePart& part = parts(i).front();
    const auto dtype = units_[i]->layout().dtype;
    if (!part.leaves) continue;
    const int64_t bytes = part.numel() * static_cast<int64_t>(c10::elementSize(dtype));
    largest = std::max(largest.value_or(0), part.master.dtype() == dtype ? 0 : bytes);
  }
  return largest;
}

bool OptimizerStates::is_aliased(int unit) const {
  const auto& parts = units_states_[unit].parts;
  return std::all_of(parts.begin(), parts.end(), [](const StatePart& part) { return part.aliased; });
}

Block OptimizerStates::own_part(int unit, int64_t first, int64_t last) const {
  first = std::max(first, begin(unit));
  return {first - begin(unit), std::max<int64_t>(0, std::min(last, end(unit)) - first)};
}

int64_t OptimizerStates::begin(int unit) const { return policy_.shard_optimizer ? units_[unit]->shard_begin() : 0; }

std::vector<UnitStateBuffer> OptimizerStates::buffers(int unit) const {
  const UnitState& state = units_states_[unit];
  std::vector<UnitStateBuffer> buffers{{"master", state.master}};
  for (size_t role = 0; role < state.states.size(); ++role) {
    if (state.states[role].defined()) buffers.push_back({rule_.roles()[role].name, state.states[role]});
  }
  return buffers;
}

int64_t OptimizerStates::predicted_bytes() const {
  int64_t bytes = 0;
  for (const UnitState& state : units_states_) {
    for (const StatePart& part : state.parts) bytes += bytes_of(state, part);
  }
  return bytes;
}

int64_t OptimizerStates::host_bytes() const {
  int64_t bytes = 0;
  for (int i = 0; i < num_units(); ++i) {
    if (const StatePart* part = part_on_host(i)) bytes += bytes_of(units_states_[i], *part);
  }
  return bytes;
}

int64_t OptimizerStates::bytes_of(const UnitState& state, const StatePart& part) {
  int64_t bytes = 0;
  if (state.packed) {
    bytes += state.packed->low.resident_bytes();
  } else if (!part.aliased) {
    bytes += part.master.resident_bytes();
  }
  for (const Buffer& buffer : part.states) bytes += buffer.defined() ? buffer.resident_bytes() : 0;
  return bytes;
}

void OptimizerStates::keep(const std::vector<Hyperparameters>& groups) {
  std::vector<std::pair<int, size_t>> needed;  // anew: group and role
  for (size_t group = 0; group < kept_.size(); ++group) {
    for (size_t role = 0; role < kept_[group].size(); ++role) {
      if (!kept_[group][role] && rule_.keeps(role, groups.at(group))) needed.emplace_back(group, role);
    }
  }
  for (const auto& [group, role] : needed) {
    kept_[group][role] = true;
    for (int i = 0; i < num_units(); ++i) {
      UnitState& state = units_states_[i];
      const auto& members = units_[i]->parameters();
      const bool has_member =
          std::any_of(members.begin(), members.end(), [&, g = group](const auto& p) { return p.group == g; });
      if (!has_member || state.states[role].defined()) continue;
      for (StatePart& part : state.parts) {
        part.states[role] = place(i, part, 1 + role, types_.of_states(units_[i]->layout().dtype));
      }
      join(state);
    }
  }
}

bool OptimizerStates::has(const sharding::Parameter& p, const std::string& role) const {
  const auto& roles = rule_.roles();
  const auto found = std::find_if(roles.begin(), roles.end(), [&](const auto& known) { return known.name == role; });
  return found == roles.end() ? role == "master" : kept_[p.group][found - roles.begin()];
}

std::set<StateName> OptimizerStates::unkept() const {
  std::set<StateName> names;
  for (const Unit* unit : units_) {
    for (const sharding::Parameter& p : unit->parameters()) {
      for (const optim::StateRole& role : rule_.roles()) {
        if (!has(p, role.name)) names.insert({p.name, role.name});
      }
    }
  }
  return names;
}

void OptimizerStates::zero(const std::set<StateName>& states) {
  at::NoGradGuard no_grad;
  for (int i = 0; i < num_units(); ++i) {
    changing(i);
    for (const sharding::Parameter& p : units_[i]->parameters()) {
      const Block own = own_part(i, p.offset, p.offset + p.numel);
      for (size_t role = 0; role < rule_.roles().size(); ++role) {
        const Buffer& buffer = units_states_[i].states[role];
        if (own.count == 0 || !buffer.defined() || !states.contains({p.name, rule_.roles()[role].name})) continue;
        for_each_block(buffer, own, [&](Block block) { buffer.lease(block, Access::update).tensor().zero_(); });
      }
    }
  }
}

std::optional<optim::StochasticRounding> OptimizerStates::rounding(int unit, int64_t element) const {
  if (!types_.moments_seed) return std::nullopt;
  return optim::StochasticRounding{*types_.moments_seed, units_states_[unit].first + begin(unit) + element};
}

/// A parameter that still equals its rounded master keeps the master's extra precision. Over-reporting written
/// elements is therefore harmless. Half a master does not show which elements were written: all of the parameter become
/// their own masters.
void OptimizerStates::refresh_masters(int unit) {
  const Buffer values = parameters(unit);
  for (sharding::Parameter& p : units_[unit]->parameters()) {
    if (!std::exchange(p.rewritten, false)) continue;
    const Block range = own_part(unit, p.offset, p.offset + p.numel);
    if (range.count == 0) continue;
    changing(unit);
    if (const auto& packed = units_states_[unit].packed) {
      for_each_block(packed->low, range,
                     [&](Block block) { packed->low.lease(block, Access::write).tensor().zero_(); });
      continue;
    }
    for (const StatePart& part : parts(unit)) {
      if (!part.aliased) refresh(part, part.within(range), tiers::slice(values, {part.begin, part.numel()}));
    }
  }
}

void OptimizerStates::refresh(const StatePart& part, Block range, const Buffer& values) const {
  const Buffer* const both[] = {&part.master, &values};
  for_each_block(both, range, [&](Block block) {
    const auto lease = part.master.lease(block, Access::update), source = values.lease(block, Access::read);
    const Tensor& master = lease.tensor();
    const Tensor written = source.tensor().to(master.device());
    master.copy_(
        at::where(at::eq(master.to(written.scalar_type()), written), master, written.to(master.scalar_type())));
  });
}

void OptimizerStates::refresh_masters() {
  at::NoGradGuard no_grad;
  for (int i = 0; i < num_units(); ++i) refresh_masters(i);
}

/// Nothing of what moves stays resident.
OptimizerStates::PartPlacement OptimizerStates::away(const StatePlacement& place, bool from_host) {
  return [&place, from_host](int, const StatePart& part, size_t, at::ScalarType dtype) {
    return part.on_host && !from_host ? Buffer() : place(part.numel(), 0, dtype);
  };
}

void OptimizerStates::move_masters(const StatePlacement& place, bool from_host) {
  moved_masters_ = true;
  moved_from_host_ = from_host;
  move_masters_to(away(place, from_host));
}

void OptimizerStates::move_moments(const StatePlacement& place, bool from_host) {
  moved_moments_ = true;
  moved_from_host_ = from_host;
  move_moments_to(away(place, from_host));
}

void OptimizerStates::move_masters_to(const PartPlacement& place) {
  for (int i = 0; i < num_units(); ++i) {
    UnitState& state = units_states_[i];
    for (StatePart& part : state.parts) {
      if (state.packed) {
        Buffer& low = state.packed->low;
        low = moved(low, place(i, part, 0, low.dtype()));
        part.master = packed_buffer(parameters(i), *state.packed);
      } else if (!part.aliased) {
        part.master = moved(part.master, place(i, part, 0, part.master.dtype()));
      }
    }
    join(state);
  }
}

void OptimizerStates::move_moments_to(const PartPlacement& place) {
  for (int i = 0; i < num_units(); ++i) {
    UnitState& state = units_states_[i];
    for (StatePart& part : state.parts) {
      for (size_t role = 0; role < part.states.size(); ++role) {
        Buffer& buffer = part.states[role];
        if (buffer.defined()) buffer = moved(buffer, place(i, part, 1 + role, buffer.dtype()));
      }
    }
    join(state);
  }
}

void OptimizerStates::bring_back() {
  const PartPlacement back = [this](int unit, const StatePart& part, size_t state, at::ScalarType dtype) {
    return part.on_host && !moved_from_host_ ? Buffer() : place(unit, part, state, dtype);
  };
  if (moved_masters_) move_masters_to(back);
  if (moved_moments_) move_moments_to(back);
  moved_masters_ = moved_moments_ = false;
}

}  // namespace deeptide::zero
