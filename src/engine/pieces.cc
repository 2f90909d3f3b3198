// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes views of units and optimizer states by parameter.
#include "engine/pieces.h"

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

/// Returns the piece of `p` in `flat`, which starts at element `begin` of its unit.
Piece piece_of(const Unit& unit, const Parameter& p, const Role& role, const Tensor& flat, int64_t begin,
               Extent extent) {
  auto [first, last] = unit.owned_range(p);
  if (extent == Extent::held) {
    first = std::max(p.offset, begin);
    last = std::max(first, std::min(p.offset + p.numel, begin + flat.numel()));
  }
  Piece piece{p.name, role, p.tensors.front().sizes().vec(), Region::range(first - p.offset, last - p.offset), {}};
  if (first == last) piece.region = Region::range(0, 0);
  piece.data = first == last ? at::empty({0}, flat.options()) : flat.narrow(0, first - begin, last - first);
  return piece;
}

/// The role of an optimizer's state, by its name there.
Role role_of_state(const std::string& name) { return name == "master" ? Role::master() : Role::moment(name); }

}  // namespace

Piece buffer_piece(const NamedTensor& buffer, const Role& role, const Tensor& storage) {
  return {buffer.name, role, buffer.tensor.sizes().vec(), Region::range(0, buffer.tensor.numel()), storage};
}

Coordinates coordinates_of(const world::Mesh& mesh, int rank) {
  const world::Mesh::Coordinates indices = mesh.coordinates(rank);
  std::map<std::string, int64_t> named;
  for (int axis = 0; axis < world::kNumAxes; ++axis) {
    named[world::axis_name(static_cast<world::Axis>(axis))] = indices[axis];
  }
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
      for (const auto& state : optimizer->states(trained)) {
        const Role role = role_of_state(state.role);
        if (!moments && role.is_moment()) continue;
        for (const Parameter& p : unit->parameters()) {
          pieces.push_back(piece_of(*unit, p, role, state.data, optimizer->state_begin(trained), extent));
        }
      }
    }
    if (unit->layout().trainable) ++trained;
  }
  return pieces;
}

}  // namespace deeptide::engine
