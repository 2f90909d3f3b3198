// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What one rank saves.
#pragma once

#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/piece.h"

namespace deeptide::checkpoint {

/// What is to be written, gathered before anything is written. Its data must stay as it is until write_rank() returns:
/// pieces are views of live state now; a save in the background will need copies of them.
struct Snapshot {
  int rank = 0;
  RankState state;
  std::vector<Piece> pieces;
};

}  // namespace deeptide::checkpoint
