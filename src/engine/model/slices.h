// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parameters of which ranks along the tensor axis have slices, as parts of the whole ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checkpoint/save/piece.h"
#include "deeptide/tensor_team.h"
#include "engine/design/topology.h"
#include "engine/model/pieces.h"

namespace deeptide::engine {

/// The shape of the parameter of which `local` is a rank's slice.
checkpoint::Shape whole_shape(const TensorSlice& slice, at::IntArrayRef local);

/// Replaces pieces of slices, which are ranges, by pieces of the whole parameters: ranges and boxes, since what a rank
/// holds of a slice along a later dimension is a part of a row, whole rows, and a part of another. Padding is left out.
/// `extent`: held: the pieces are to be filled.
void place_slices(const Topology& topology, Extent extent, std::vector<checkpoint::Piece>& pieces);

/// Returns live_pieces, with slices placed.
std::vector<checkpoint::Piece> whole_pieces(const Topology& topology, const BoundModel& model,
                                            const zero::ShardedOptimizer* optimizer, bool moments, Extent extent);

/// The whole parameter, from every rank's slice. Shapes: slices (ranks, *local).
at::Tensor joined(const TensorSlice& slice, const at::Tensor& slices);

/// The slice of rank `index` of `ranks`, in memory of its own, padded with zeros.
at::Tensor cut(const TensorSlice& slice, const at::Tensor& whole, int ranks, int index);

}  // namespace deeptide::engine
