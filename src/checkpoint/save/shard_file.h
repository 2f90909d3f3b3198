// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The files of one rank's shard: one, or a part in each of several folders.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/piece_table.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// Before write_rank(): gives each piece its part, so that parts have about equal bytes. A range of more than a block
/// is cut where a part ends, between blocks.
void deal_out(std::vector<Piece>& pieces, int parts);

/// A file with the pieces of one part.
struct ShardFile {
  std::string name;
  std::string path;  // it is written here
  std::string header;
  std::vector<const Piece*> pieces;  // in the file's order
};

/// The files of a shard, and where its tensors lie in them.
struct ShardLayout {
  std::vector<ShardFile> files;  // by part; no part of several is left out
  Table table;
};

/// Lays out the pieces that have no file of their own. `metadata`: of each header.
/// Errors: CheckpointError for pieces that make no sense.
ShardLayout lay_out(const std::vector<Piece>& pieces, int rank, int parts,
                    const std::map<std::string, std::string>& metadata);

/// Writes all files, the parts side by side, through `buffer_bytes` of memory, and notes the hashes of what they hold
/// in the table. Returns the bytes of all. Errors: CheckpointError.
int64_t write_files(ShardLayout& layout, int64_t buffer_bytes);

}  // namespace deeptide::checkpoint
