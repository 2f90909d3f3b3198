// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A checkpoint's first form: one safetensors file a rank and a JSON manifest of global shapes and ranges.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide::checkpoint {

/// A piece of a logical tensor that this rank owns: elements [begin, end) of the flattened tensor; may be empty.
/// Key: `name` (logical parameter, any UTF-8) and `role` ("master", "exp_avg", "exp_avg_sq", "momentum", "param",
/// "buffer"; no '/' and no '@'). A rank may own several pieces of one tensor; no two pieces of a world may overlap.
struct Piece {
  std::string name;
  std::string role;
  std::vector<int64_t> shape;  // of the whole logical tensor
  int64_t begin = 0;
  int64_t end = 0;
  at::Tensor data;  // (end - begin,), any stride and device: to be written, or to be filled on load
};

/// Everything of a checkpoint that is not tensors. Serialised in manifest.json (global) by rank 0. The JSON texts are
/// kept as they are, character for character, so integers of any size and NaN come back as they went in.
struct Manifest {
  int version = 1;
  int world_size = 1;
  std::string state_json = "{}";  // engine counters, schedule, groups, data position of rank 0, config text
  std::string client_state_json = "{}";
};

/// Collective in effect, without communicating itself: every rank calls `write_rank` into `<directory>/<tag>.tmp`,
/// then, after a barrier that the caller makes, rank 0 calls `commit`, which merges the ranks' piece tables into
/// manifest.json, fsyncs, renames the folder to `<directory>/<tag>` and points `<directory>/latest` at it. A failure at
/// any moment leaves the previous checkpoint as it was. Errors: CheckpointError (no space, not writable, a tag that is
/// no folder name, ranks that contradict each other), naming path, bytes and errno's text.
void write_rank(const std::string& directory, const std::string& tag, int rank, const std::vector<Piece>& pieces,
                const std::string& rank_state_json);
/// Returns `<directory>/<tag>`.
std::string commit(const std::string& directory, const std::string& tag, const Manifest& manifest, bool save_latest);
/// Removes `<directory>/<tag>.tmp` after a failed save. Never throws for what it cannot remove.
void abandon(const std::string& directory, const std::string& tag);

/// The tag in `<directory>/latest`; empty when there is none.
std::string latest_tag(const std::string& directory);

/// Reads a checkpoint written by any number of ranks. Cheap to copy; const functions may run in several threads.
class Reader {
 public:
  /// Errors: CheckpointError when manifest or a shard is missing, truncated or malformed (says which and why).
  Reader(const std::string& directory, const std::string& tag);
  const Manifest& manifest() const;
  /// The state a rank of the saved world stored; empty when `rank` was not in it.
  std::string rank_state_json(int rank) const;
  /// Lists every mismatch against `wanted` (missing, unexpected if strict, other shape, range not covered): empty when
  /// it fits. With `strict`, `wanted` names every logical tensor, by an empty piece where this rank owns nothing of it.
  std::vector<std::string> check(const std::vector<Piece>& wanted, bool strict) const;
  /// Fills `wanted[i].data` from whichever shards hold its range, casting when dtypes differ.
  /// Errors: CheckpointError with check()'s lines when `wanted` does not fit (nothing is filled then), or on a failed
  /// read.
  void read(const std::vector<Piece>& wanted) const;
  /// All logical tensors: name, role, shape, as the range [0, numel); data undefined.
  std::vector<Piece> table() const;

 private:
  struct Contents;  // the manifest's tables, checked against the shards' headers
  std::shared_ptr<const Contents> contents_;
};

}  // namespace deeptide::checkpoint
