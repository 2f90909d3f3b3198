// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An engine's state as pieces of logical tensors, as checkpoints and inspection name them.
#pragma once

#include <vector>

#include "checkpoint/save/piece.h"
#include "engine/bind/bound_model.h"
#include "world/mesh.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::engine {

/// Which elements: those that this rank owns (saved exactly once), or all that it has in memory (loaded everywhere; at
/// stage 0 every rank holds all).
enum class Extent : uint8_t { owned, held };

/// Returns all that this rank saves, or requests on load, as views of the live state. `optimizer`: null for none.
/// `moments`: include optimizer states besides masters.
std::vector<checkpoint::Piece> live_pieces(const BoundModel& model, const zero::ShardedOptimizer* optimizer,
                                           bool moments, Extent extent);

/// The piece of a whole buffer, with its elements in `storage`. Shapes: storage (numel,).
checkpoint::Piece buffer_piece(const NamedTensor& buffer, const checkpoint::Role& role, const at::Tensor& storage);

/// Returns a tensor that may be read by its address: `tensor` itself, or a copy if it is a view of a sharded parameter.
at::Tensor readable(const at::Tensor& tensor);

/// A rank's place on the mesh: the key of its own state in a checkpoint.
checkpoint::Coordinates coordinates_of(const world::Mesh& mesh, int rank);
/// The same without its stage, and of the first rank that shares its layers, for buffers: names tell those of stages
/// apart, ranks along the tensor axis have them alike, and a mesh without these axes finds them.
checkpoint::Coordinates buffer_coordinates_of(const world::Mesh& mesh, int rank);

}  // namespace deeptide::engine
