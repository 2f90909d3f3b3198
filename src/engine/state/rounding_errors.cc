// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the errors by parameter, so that units may be cut otherwise in the run that loads them.
#include "engine/state/rounding_errors.h"

#include <ATen/ops/zeros_like.h>

#include <map>

#include "engine/model/pieces.h"

namespace deeptide::engine {

using at::Tensor;
using checkpoint::Piece;
using checkpoint::Region;
using checkpoint::Role;

std::vector<Piece> rounding_error_pieces(const BoundModel& model, const std::vector<Tensor>& errors,
                                         const checkpoint::Coordinates& own) {
  std::vector<Piece> pieces;
  const Role role = Role::rounding_error(own);
  size_t trained = 0;
  for (const auto& unit : model.units()) {
    if (errors.empty() || !unit->layout().trainable) continue;
    const Tensor& error = errors[trained++];
    if (error.numel() == 0) continue;  // its gradients travel whole
    for (const sharding::Parameter& p : unit->parameters()) {
      pieces.push_back({p.name, role, {p.numel}, Region::range(0, p.numel), error.narrow(0, p.offset, p.numel)});
    }
  }
  return pieces;
}

RoundingErrorLoad::RoundingErrorLoad(const checkpoint::Reader& reader, const BoundModel& model,
                                     const std::vector<Tensor>& errors, Channels& channels,
                                     std::vector<Piece>& wanted) {
  if (errors.empty() || reader.manifest().world_size != channels.world().size) return;
  for (const Tensor& error : errors) staged_.push_back(at::zeros_like(error));
  std::map<checkpoint::TensorId, checkpoint::Shape> saved;
  for (const Piece& piece : reader.table()) saved.emplace(checkpoint::TensorId{piece.name, piece.role}, piece.shape);
  for (Piece& piece : rounding_error_pieces(model, staged_, coordinates_of(channels.mesh(), channels.world().rank))) {
    const auto found = saved.find({piece.name, piece.role});
    if (found != saved.end() && found->second == piece.shape) wanted.push_back(std::move(piece));
  }
}

void RoundingErrorLoad::apply(const std::vector<Tensor>& errors) const {
  for (size_t i = 0; i < errors.size(); ++i) {
    const Tensor& error = errors[i];
    staged_.empty() ? error.zero_() : error.copy_(staged_[i]);
  }
}

}  // namespace deeptide::engine
