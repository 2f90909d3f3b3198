// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which ranges of which logical tensors lie where: a rank's table, the manifest's, and their JSON.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/shard_file.h"

namespace deeptide::checkpoint {

struct Extent {
  int64_t begin = 0;  // elements of the flattened logical tensor
  int64_t end = 0;
  std::string file;    // in the checkpoint's folder
  int64_t offset = 0;  // bytes from the start of the file
};

struct Logical {
  std::string name;
  std::string role;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<Extent> extents;  // by begin; none is empty, no two overlap
};
using Table = std::map<std::string, Logical>;  // by tensor_key()

/// Unique, since a role has no '/'.
std::string tensor_key(const std::string& name, const std::string& role);
/// The key of one of several ranges that a rank has of a tensor.
std::string range_key(const std::string& key, int64_t begin);

std::string shard_name(int rank);       // "rank_00000.safetensors"
std::string rank_table_name(int rank);  // "rank_00000.json"
constexpr const char* kManifestName = "manifest.json";

/// Errors: CheckpointError when shape or dtype differ from what `table` has under this key.
Logical& declare(Table& table, const Logical& logical);
/// Sorts extents. Errors: CheckpointError when they overlap or leave the tensor.
void check_extents(Table& table, const std::string& where);

struct RankTable {
  std::string state_json;
  Table tensors;
};
struct ManifestTable {
  Manifest manifest;
  std::vector<std::string> rank_states;
  Table tensors;
};

/// Errors: CheckpointError for text that is not UTF-8.
std::string encode(const RankTable& table);
std::string encode(const ManifestTable& table);
/// Errors: CheckpointError naming `path` when the text is malformed, or written by a newer version.
RankTable decode_rank_table(const std::string& text, const std::string& path);
ManifestTable decode_manifest(const std::string& text, const std::string& path);

}  // namespace deeptide::checkpoint
