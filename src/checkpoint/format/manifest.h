// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint and the tables that its ranks write for it, as JSON.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/piece_table.h"
#include "checkpoint/format/role.h"

namespace deeptide::checkpoint {

/// The newest version of manifests; all are read. Written is 3 where no file is shared with other checkpoints: programs
/// of before 4 read such a save.
inline constexpr int kManifestVersion = 4;

/// Everything global of a checkpoint that is not tensors. The JSON texts are kept as they are, character for character,
/// so integers of any size and NaN are read back unchanged.
struct Manifest {
  int version = kManifestVersion;
  int world_size = 1;
  std::string state_json = "{}";  // engine counters, schedule, groups, data position of rank 0, config text
  std::string client_state_json = "{}";
};

/// The state of one rank that is not tensors, such as its random generators.
struct RankState {
  Coordinates coordinates;
  std::string json;
};

struct RankTable {
  std::string nonce;  // of the save
  RankState state;
  Table tensors;
  std::map<std::string, ContentHash> header_hashes{};  // by file: of the bytes before its data
};
struct ManifestTable {
  Manifest manifest;
  std::string nonce;  // of the save; empty in version 1, whose shards have none
  std::vector<RankState> rank_states;
  Table tensors;
  std::map<std::string, ContentHash> header_hashes{};  // by file; empty where the save has none
};

/// Errors: CheckpointError for text that is not UTF-8.
std::string encode(const RankTable& table);
std::string encode(const ManifestTable& table);
/// Errors: CheckpointError naming `path` when the text is malformed, has another checksum than it says, or was written
/// by a newer version.
RankTable decode_rank_table(const std::string& text, const std::string& path);
ManifestTable decode_manifest(const std::string& text, const std::string& path);

}  // namespace deeptide::checkpoint
