// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A checkpoint's first form: one safetensors file a rank and a JSON manifest of global shapes and ranges.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide::checkpoint {

/// A piece of a logical tensor that this rank owns: elements [begin, end) of the flattened tensor.
/// Key: `name` (logical parameter) and `role` ("master", "exp_avg", "exp_avg_sq", "momentum", "param", "buffer").
struct Piece {
  std::string name;
  std::string role;
  std::vector<int64_t> shape;  // of the whole logical tensor
  int64_t begin = 0;
  int64_t end = 0;
  at::Tensor data;  // (end - begin,), contiguous, any device: to be written, or to be filled on load
};

/// Everything of a checkpoint that is not tensors. Serialised in manifest.json (global) by rank 0.
struct Manifest {
  int version = 1;
  int world_size = 1;
  std::string state_json = "{}";         // engine counters, schedule, groups, data position of rank 0, config text
  std::string client_state_json = "{}";
};

/// Collective in effect, without communicating itself: every rank calls `write_rank` into `<directory>/<tag>.tmp`, then,
/// after a barrier that the caller makes, rank 0 calls `commit`, which merges the ranks' piece tables into manifest.json,
/// fsyncs, renames the folder to `<directory>/<tag>` and points `<directory>/latest` at it. A failure at any moment leaves
/// the previous checkpoint as it was. Errors: CheckpointError (no space, not writable), naming path, bytes and errno's text.
void write_rank(const std::string& directory, const std::string& tag, int rank, const std::vector<Piece>& pieces,
                const std::string& rank_state_json);
std::string commit(const std::string& directory, const std::string& tag, const Manifest& manifest, bool save_latest);
/// Removes `<directory>/<tag>.tmp` after a failed save.
void abandon(const std::string& directory, const std::string& tag);

/// The tag in `<directory>/latest`; empty when there is none.
std::string latest_tag(const std::string& directory);

/// Reads a checkpoint written by any number of ranks.
class Reader {
 public:
  /// Errors: CheckpointError when manifest or a shard is missing, truncated or malformed (says which and why).
  Reader(const std::string& directory, const std::string& tag);
  const Manifest& manifest() const { return manifest_; }
  /// The state a rank of the saved world stored; empty when `rank` was not in it.
  std::string rank_state_json(int rank) const;
  /// Lists every mismatch against `wanted` (missing, unexpected if strict, other shape, range not covered): empty when it fits.
  std::vector<std::string> check(const std::vector<Piece>& wanted, bool strict) const;
  /// Fills `wanted[i].data` from whichever shards hold its range, casting when dtypes differ. Call check() first.
  void read(const std::vector<Piece>& wanted) const;
  std::vector<Piece> table() const;  // all logical tensors: name, role, shape; data undefined

 private:
  struct Source;  // where a range lies: file, byte offset, dtype
  std::string path_;
  Manifest manifest_;
  std::vector<std::string> rank_states_;
  std::vector<std::pair<Piece, std::shared_ptr<Source>>> sources_;
};

}  // namespace deeptide::checkpoint
