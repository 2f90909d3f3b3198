// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parameters of which ranks along the tensor axis have slices, as parts of the whole ones.
#pragma once

#include <vector>

#include "checkpoint/save/piece.h"
#include "engine/design/topology.h"
#include "engine/model/pieces.h"

namespace deeptide::engine {

/// Replaces pieces of slices, which are ranges, by pieces of the whole parameters: ranges and boxes, since what a rank
/// holds of a slice along a later dimension is a part of a row, whole rows, and a part of another. Padding is left out.
/// `extent`: held: the pieces are to be filled.
void place_slices(const Topology& topology, Extent extent, std::vector<checkpoint::Piece>& pieces);

/// Returns live_pieces, with slices placed.
std::vector<checkpoint::Piece> whole_pieces(const Topology& topology, const BoundModel& model,
                                            const zero::ShardedOptimizer* optimizer, bool moments, Extent extent);

}  // namespace deeptide::engine
