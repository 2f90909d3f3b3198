// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps the roles that an engine wants to those that were saved.
#include "engine/state/saved_roles.h"

namespace deeptide::engine {

using checkpoint::Coordinates;
using checkpoint::Piece;
using checkpoint::Role;

namespace {

constexpr const char* kTorchsMomentum = "momentum_buffer";

}  // namespace

SavedRoles::SavedRoles(const checkpoint::Reader& reader, const Coordinates& coordinates) : buffer_(Role::buffer()) {
  const Role own = Role::buffer(coordinates);
  for (const Piece& piece : reader.table()) {
    if (piece.role == own) buffer_ = own;
    if (piece.role.is_weight()) weights_.insert_or_assign(piece.name, piece.role);
    if (piece.role.is_buffer()) buffers_.insert(piece.name);
    if (piece.role.is_moment() && piece.role.moment_name() == kTorchsMomentum) torchs_momenta_.insert(piece.name);
  }
}

void translate_roles(const SavedRoles& saved, std::vector<Piece>& wanted) {
  for (Piece& piece : wanted) {
    const bool is_momentum = piece.role.is_moment() && piece.role.moment_name() == "momentum";
    if (is_momentum && saved.has_torchs_momentum(piece.name)) piece.role = Role::moment(kTorchsMomentum);
    if (!piece.role.is_weight()) continue;
    if (const auto role = saved.weight(piece.name)) {
      piece.role = *role;
    } else if (saved.has_buffer(piece.name)) {
      piece.role = saved.buffer();
    }
  }
}

Role loose_role(const SavedRoles& saved, const std::string& name) {
  const auto weight = saved.weight(name);
  return weight && !saved.has_buffer(name) ? *weight : saved.buffer();
}

}  // namespace deeptide::engine
