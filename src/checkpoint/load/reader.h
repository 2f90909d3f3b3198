// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any region of any logical tensor, from whichever shards hold it.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/format/contents.h"
#include "checkpoint/load/streamed_reads.h"
#include "checkpoint/save/piece.h"

namespace deeptide::checkpoint {

/// Elements of a wanted piece that lie on another host: what one extent and `region` share, in flattened order.
struct PartElsewhere {
  size_t piece = 0;  // of those wanted
  TensorId id;
  std::string file;
  int64_t extent = 0;  // of the tensor's in the table
  Region region;       // a part of the piece's, whose elements follow one another there
};

/// Reads a checkpoint of any version, written by any number of ranks. Cheap to copy; several threads may call const
/// functions.
class Reader {
 public:
  /// Errors: CheckpointError when the manifest or a shard is missing, truncated, malformed or of another save.
  Reader(const std::string& directory, const std::string& tag);
  /// Reads what others wrote into files of `folder`, described in our tables. No file of it is checked here.
  Reader(const std::string& folder, ManifestTable contents);
  /// Reads a folder that has a part of the files, the others being on other hosts. Errors: as above, for what is there.
  static Reader of_host(const std::string& folder, ManifestTable contents);
  const Manifest& manifest() const;
  /// The state that the rank at `coordinates` saved; empty when the saved mesh had no such rank.
  std::string rank_state_json(const Coordinates& coordinates) const;
  /// Lists every mismatch of `wanted`: missing, other shape, dtype that is not cast, region not covered. With `strict`
  /// also each tensor of the checkpoint that is neither in `wanted` nor in `ignored`, nor a further name for elements
  /// that are (as of a tied weight that others saved); `wanted` then names every logical tensor, by an empty piece
  /// where this rank needs nothing of it. Empty when all fits.
  std::vector<std::string> check(const std::vector<Piece>& wanted, bool strict,
                                 const std::set<TensorId>& ignored = {}) const;
  /// Fills the data of `wanted` from whichever shards hold their regions, casting when dtypes differ. `readers`: ranks
  /// of this host that want as much of the same tensors, the same bytes or others. Errors: CheckpointError with
  /// check()'s lines when `wanted` does not fit (nothing is filled then), or on a failed read.
  void read(const std::vector<Piece>& wanted, int readers = 1) const;
  /// Likewise, of what announce_all() gave.
  void read(const std::vector<Piece>& wanted, StreamedReads& files) const;
  /// Likewise, but leaves out what lies in files that this folder lacks, and returns it, at most kBlockBytes each.
  std::vector<PartElsewhere> read_here(const std::vector<Piece>& wanted, int readers = 1) const;
  /// The files of the checkpoint that the folder has.
  std::set<std::string> files_here() const;
  /// Reads a part that another rank wants. Shapes: (elements,) in the saved type.
  at::Tensor read_part(const PartElsewhere& part) const;
  int64_t numel(const PartElsewhere& part) const;
  /// Fills the part of `wanted` from what another rank has read. Shapes: block (elements,).
  void fill(const Piece& wanted, const PartElsewhere& part, const at::Tensor& block) const;
  /// Compares the tensors that `wanted` names with their hashes, whole, and changes nothing. `parts` readers share the
  /// work, this is number `part` of them; of buffers, which differ between ranks, each compares all that it names.
  /// Errors: CheckpointError naming the first damaged tensor. A save without hashes has nothing to compare.
  void verify(const std::vector<Piece>& wanted, int part, int parts) const;
  /// All logical tensors, in the order of names: each whole, as a range of the flattened tensor; of the data
  /// only the type.
  std::vector<Piece> table() const;
  /// For who reads the tensors of table() in its order.
  std::unique_ptr<StreamedReads> announce_all() const;

 private:
  void require_fit(const std::vector<Piece>& wanted) const;

  std::shared_ptr<const Contents> contents_;
};

}  // namespace deeptide::checkpoint
