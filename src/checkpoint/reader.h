// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any region of any logical tensor, from whichever shards hold it.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/piece.h"

namespace deeptide::checkpoint {

/// The tag in `<directory>/latest`; empty when there is none.
std::string latest_tag(const std::string& directory);

/// Reads a checkpoint of any version, written by any number of ranks. Cheap to copy; several threads may call const
/// functions.
class Reader {
 public:
  /// Errors: CheckpointError when the manifest or a shard is missing, truncated, malformed or of another save.
  Reader(const std::string& directory, const std::string& tag);
  const Manifest& manifest() const;
  /// The state that the rank at `coordinates` saved; empty when the saved mesh had no such rank.
  std::string rank_state_json(const Coordinates& coordinates) const;
  /// Lists every mismatch of `wanted`: missing, other shape, dtype that is not cast, region not covered. With `strict`
  /// also each tensor of the checkpoint that is neither in `wanted` nor in `ignored`; `wanted` then names every
  /// logical tensor, by an empty piece where this rank needs nothing of it. Empty when all fits.
  std::vector<std::string> check(const std::vector<Piece>& wanted, bool strict,
                                 const std::set<TensorId>& ignored = {}) const;
  /// Fills the data of `wanted` from whichever shards hold their regions, casting when dtypes differ.
  /// Errors: CheckpointError with check()'s lines when `wanted` does not fit (nothing is filled then), or on a failed
  /// read.
  void read(const std::vector<Piece>& wanted) const;
  /// All logical tensors, in the order of names: each whole, as a range of the flattened tensor; of the data
  /// only the type.
  std::vector<Piece> table() const;

 private:
  struct Contents;  // the manifest's tables, checked against the shards' headers
  std::shared_ptr<const Contents> contents_;
};

}  // namespace deeptide::checkpoint
