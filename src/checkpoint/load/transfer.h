// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a saved region and a wanted one share, from a file into a piece's data.
#pragma once

#include "checkpoint/format/piece_table.h"
#include "checkpoint/load/streamed_reads.h"
#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// Fills the elements of `wanted` that `extent` of `saved` holds in its file, casting when dtypes differ. Runs that lie
/// close together in the file are read at once.
void transfer(StreamedReads& files, const Logical& saved, const Extent& extent, const Piece& wanted);

/// Gives `wanted` the elements from `position` of its region on, casting when dtypes differ. Shapes: block (n,).
void fill(const Piece& wanted, int64_t position, const at::Tensor& block);

}  // namespace deeptide::checkpoint
