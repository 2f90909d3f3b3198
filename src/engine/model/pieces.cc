// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes views of units and optimizer states by parameter.
#include "engine/model/pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <string>

namespace deeptide::engine {

using at::Tensor;
using checkpoint::Coordinates;
using checkpoint::Piece;
using checkpoint::Region;
using checkpoint::Role;
using sharding::Parameter;
using sharding::Unit;

namespace {

/// Moves elements from `first` on between a buffer and a checkpoint's blocks, lease by lease.
checkpoint::BlockTransfer leased_transfer(const tiers::Buffer& buffer, int64_t first, Extent extent) {
  const bool loads = extent == Extent::held;
  return [buffer, first, loads](int64_t begin, const Tensor& block) {
    for_each_block(buffer, {first + begin, block.numel()}, [&](tiers::Block range) {
      const Tensor part = block.narrow(0, range.begin - first - begin, range.count);
      if (!loads) return buffer.copy_beside(range, part);
      buffer.lease(range, tiers::Access::update).tensor().copy_(part);
    });
  };
}

checkpoint::PieceData data_of(const tiers::Buffer& buffer, int64_t first, int64_t count, Extent extent) {
  if (const Tensor whole = buffer.in_place(); whole.defined()) return whole.narrow(0, first, count);
  return {buffer.dtype(), leased_transfer(buffer, first, extent)};
}

/// Returns the piece of `p` in `flat`, which starts at element `begin` of its unit.
Piece piece_of(const Unit& unit, const Parameter& p, const Role& role, const tiers::Buffer& flat, int64_t begin,
               Extent extent) {
  auto [first, last] = unit.owned_range(p);
  if (!unit.is_first_holder()) last = first;  // another rank saves these elements
  if (extent == Extent::held) {
    first = std::max(p.offset, begin);
    last = std::max(first, std::min(p.offset + p.numel, begin + flat.numel()));
  }
  const auto shape = p.tensors.front().sizes().vec();
  if (first == last) return {p.name, role, shape, Region::range(0, 0), at::empty({0}, flat.dtype())};
  const auto region = Region::range(first - p.offset, last - p.offset);
  return {p.name, role, shape, region, data_of(flat, first - begin, last - first, extent)};
}

/// The role of an optimizer's state, by its name there.
Role role_of_state(const std::string& name) { return name == "master" ? Role::master() : Role::moment(name); }

}  // namespace

Piece buffer_piece(const NamedTensor& buffer, const Role& role, const Tensor& storage) {
  return {buffer.name, role, buffer.tensor.sizes().vec(), Region::range(0, buffer.tensor.numel()), storage};
}

Tensor readable(const Tensor& tensor) {
  return sharding::has_gate_key(tensor) ? tensor.detach().clone() : tensor.detach();
}

Coordinates coordinates_of(const world::Mesh& mesh, int rank) {
  const world::Mesh::Coordinates indices = mesh.coordinates(rank);
  std::map<std::string, int64_t> named;
  for (int axis = 0; axis < world::kNumAxes; ++axis) {
    named[world::axis_name(static_cast<world::Axis>(axis))] = indices[axis];
  }
  return Coordinates(named);
}

Coordinates buffer_coordinates_of(const world::Mesh& mesh, int rank) {
  std::map<std::string, int64_t> named = coordinates_of(mesh, rank).indices();
  named.erase(world::axis_name(world::Axis::pipe));
  named[world::axis_name(world::Axis::tensor)] = 0;
  return Coordinates(named);
}

std::vector<Piece> live_pieces(const BoundModel& model, const zero::ShardedOptimizer* optimizer, bool moments,
                               Extent extent) {
  std::vector<Piece> pieces;
  int trained = 0;
  for (const auto& unit : model.units()) {
    const bool has_states = unit->layout().trainable && optimizer != nullptr;
    if (!has_states) {
      for (const Parameter& p : unit->parameters()) {
        pieces.push_back(piece_of(*unit, p, Role::param(), unit->shard(), unit->shard_begin(), extent));
      }
    } else {
      const zero::OptimizerStates& states = optimizer->states();
      for (const auto& state : states.buffers(trained)) {
        const Role role = role_of_state(state.role);
        if (!moments && role.is_moment()) continue;
        for (const Parameter& p : unit->parameters()) {
          if (!states.has(p, state.role)) continue;
          pieces.push_back(piece_of(*unit, p, role, state.data, states.begin(trained), extent));
          // A program may write parameters, and with them masters that lie in their memory; a device's memory is read
          // in the order of its work.
          const bool is_own = role.is_moment() || states.has_own_master(trained);
          if (is_own && !states.use_host() && model.device().is_cpu()) pieces.back().changes_with = trained;
        }
      }
    }
    if (unit->layout().trainable) ++trained;
  }
  return pieces;
}

}  // namespace deeptide::engine
