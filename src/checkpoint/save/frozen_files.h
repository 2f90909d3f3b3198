// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Files of single tensors that are not trained: the checkpoints of a folder share them as hard links.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/save/snapshot.h"

namespace deeptide::checkpoint {

// A file's name is a hash of what it holds: which elements of which tensor, and their bytes. The file system counts the
// links: a checkpoint is whole by itself, and removing it takes nothing from the others.

/// Pieces smaller than this are not worth a file.
inline constexpr int64_t kLeastApartBytes = int64_t{64} << 10;

/// Before write_rank(): reads the pieces that are marked `apart` and moves those from `pieces` to `stored` that a
/// checkpoint in `target.directory` has, after linking its files into the growing folder. The others stay, to be
/// written: also where the file system cannot link. Errors: CheckpointError for a folder that cannot be listed, or a
/// tag that is no folder name.
void link_stored(const SaveTarget& target, Snapshot& snapshot);

/// Writes a piece into a file of its own in the folder `growing`. Errors: CheckpointError.
StoredPiece write_apart(const std::string& growing, int rank, const Piece& piece, int64_t buffer_bytes);

}  // namespace deeptide::checkpoint
