// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a saved region and a wanted one share, and checks it against the hashes of the save.
#pragma once

#include <cstdint>

#include "checkpoint/format/piece_table.h"
#include "checkpoint/load/streamed_reads.h"

namespace deeptide::checkpoint {

/// Takes the elements of a wanted region, by their position in it.
class ElementSink {
 public:
  virtual ~ElementSink() = default;
  /// Memory that elements from `position` on are read into; null where they come by put().
  virtual char* memory(int64_t position) = 0;
  /// Takes `count` elements of the saved dtype, which stay valid during the call.
  virtual void put(int64_t position, const char* elements, int64_t count) = 0;
};

/// Gives `sink` the elements of `wanted` that `extent` of `saved` holds in its file. Runs that lie close together there
/// are read at once. Who reads the middle of a block compares all of it with its hash: one of the ranks that share
/// it.
/// Errors: CheckpointError that names tensor, elements and file when a block is not the one that was saved.
void read_shared(StreamedReads& files, const Logical& saved, const Extent& extent, const Region& wanted,
                 ElementSink& sink);
/// Announces what `read_shared` will read.
void announce_shared(StreamedReads& files, const Logical& saved, const Extent& extent, const Region& wanted);
/// Announces elements [begin, end) of the flattened tensor, which are read in order.
void announce_range(StreamedReads& files, const Logical& saved, int64_t begin, int64_t end);
/// Announces a tensor that is read from its first element to its last.
void announce_whole(StreamedReads& files, const Logical& saved);

/// The number of an extent's hashed blocks; 0 without hashes.
int64_t num_hashed_blocks(const Extent& extent);
/// Announces what `verify_blocks` will read.
void announce_blocks(StreamedReads& files, const Logical& saved, const Extent& extent, int64_t first, int64_t stride);
/// Reads the blocks `first`, `first + stride`, … of the extent and compares them with their hashes. Errors: likewise.
void verify_blocks(StreamedReads& files, const Logical& saved, const Extent& extent, int64_t first, int64_t stride);

}  // namespace deeptide::checkpoint
