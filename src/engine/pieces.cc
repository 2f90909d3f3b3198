// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Views of units and optimizer states by parameter.
#include "engine/pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace deeptide::engine {

using at::Tensor;
using checkpoint::Piece;
using sharding::Parameter;
using sharding::Unit;

namespace {

/// The piece of `p` in `flat`, which starts at element `begin` of its unit.
Piece piece_of(const Unit& unit, const Parameter& p, const std::string& role, const Tensor& flat, int64_t begin,
               Extent extent) {
  auto [first, last] = unit.owned_range(p);
  if (extent == Extent::held) {
    first = std::max(p.offset, begin);
    last = std::max(first, std::min(p.offset + p.numel, begin + flat.numel()));
  }
  Piece piece{p.name, role, p.tensors.front().sizes().vec(), first - p.offset, last - p.offset, {}};
  if (first == last) piece.begin = piece.end = 0;
  piece.data = first == last ? at::empty({0}, flat.options()) : flat.narrow(0, first - begin, last - first);
  return piece;
}

}  // namespace

std::string buffer_role(int rank) { return rank == 0 ? "buffer" : "buffer." + std::to_string(rank); }

Piece buffer_piece(const NamedTensor& buffer, const std::string& role, const Tensor& storage) {
  return {buffer.name, role, buffer.tensor.sizes().vec(), 0, buffer.tensor.numel(), storage};
}

std::vector<Piece> live_pieces(const BoundModel& model, const zero::ShardedOptimizer* optimizer, bool moments,
                               Extent extent) {
  std::vector<Piece> pieces;
  int trained = 0;
  for (const auto& unit : model.units()) {
    const bool has_states = unit->layout().trainable && optimizer != nullptr;
    if (!has_states) {
      for (const Parameter& p : unit->parameters()) {
        pieces.push_back(piece_of(*unit, p, "param", unit->shard(), unit->shard_begin(), extent));
      }
    } else {
      for (const auto& state : optimizer->states(trained)) {
        if (!moments && state.role != "master") continue;
        for (const Parameter& p : unit->parameters()) {
          pieces.push_back(piece_of(*unit, p, state.role, state.data, optimizer->state_begin(trained), extent));
        }
      }
    }
    if (unit->layout().trainable) ++trained;
  }
  return pieces;
}

}  // namespace deeptide::engine
