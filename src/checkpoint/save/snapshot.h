// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds what one rank saves.
#pragma once

#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// A piece with a file of its own in the growing folder.
struct StoredPiece {
  TensorId id;
  Shape shape;  // of the whole logical tensor
  at::ScalarType dtype = at::ScalarType::Float;
  Extent extent;
  ContentHash header_hash;  // of the file's bytes before its data
};

/// The pieces of a save, gathered before anything is written. Their data must stay as it is until write_rank() returns:
/// pieces are views of live state, or of what LiveState keeps of it.
struct Snapshot {
  int rank = 0;
  RankState state;
  std::vector<Piece> pieces;
  std::vector<StoredPiece> stored{};  // no longer in `pieces`
};

}  // namespace deeptide::checkpoint
