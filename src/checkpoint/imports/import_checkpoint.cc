// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies what others saved into a checkpoint of this library, region by region.
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <utility>

#include "base/libraries/format.h"
#include "base/log.h"
#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/imports/open_checkpoint.h"
#include "checkpoint/imports/weights/weight_places.h"
#include "checkpoint/load/other_folders.h"
#include "checkpoint/save/writer.h"
#include "deeptide/weights.h"

namespace deeptide {

using checkpoint::Piece;
using checkpoint::Reader;
using checkpoint::Region;

namespace {

/// A pair to import that open_checkpoint() knows.
struct Source {
  std::string directory;
  std::string tag;
};

/// Errors: CheckpointError that says what there is instead of a checkpoint or weights.
Source source_of(const std::string& path, const std::string& tag) {
  if (!tag.empty()) return {path, tag};
  const std::string weights = checkpoint::tag_of_weights(path);
  if (!weights.empty()) return {path, weights};
  const std::string latest = checkpoint::tag_to_load(path, /*universal=*/true);
  if (!latest.empty()) return {path, latest};
  if (checkpoint::is_deepspeed_folder(path)) {
    const std::filesystem::path itself = path;
    return {itself.has_parent_path() ? itself.parent_path().string() : ".", itself.filename().string()};
  }
  throw CheckpointError("no checkpoint in " + path + ", nor weights, and no file 'latest'" +
                        checkpoint::other_contents(path) + checkpoint::tags_in(path));
}

/// All tensors, each once, with data that is read as it is written.
checkpoint::Snapshot copy_of(const Reader& reader, const std::set<std::string>& left_out) {
  checkpoint::Snapshot snapshot;
  const std::shared_ptr<checkpoint::StreamedReads> files = reader.announce_all();
  for (Piece& piece : reader.table()) {
    if (left_out.contains(piece.name)) continue;
    const Piece whole = piece;
    const auto copy = [reader, files, whole](int64_t begin, const at::Tensor& block) {
      Piece part = whole;
      part.region = Region::range(begin, begin + block.numel());
      part.data = block;
      reader.read({part}, *files);
    };
    piece.data = checkpoint::PieceData(whole.data.dtype(), copy);
    snapshot.pieces.push_back(std::move(piece));
  }
  return snapshot;
}

}  // namespace

std::string import_checkpoint(const std::string& source, const std::string& directory, const std::string& source_tag,
                              const std::string& tag) {
  const at::NoGradGuard no_grad;
  const Source from = source_of(checkpoint::plain_path(source), source_tag);
  const bool is_weights = from.tag == checkpoint::kWeightsTag;
  const Reader reader = checkpoint::open_checkpoint(from.directory, from.tag);
  const auto weights = is_weights ? checkpoint::find_weights(from.directory) : checkpoint::WeightPlaces();
  if (!weights.no_tensors.empty()) {
    log(LogLevel::warning, "import of " + from.directory + ": left out, for they are no tensors: " +
                               join_text(weights.no_tensors, ", ") + "; keep the file if you need them");
  }
  const checkpoint::Snapshot snapshot = copy_of(reader, weights.further_names);
  const std::string default_tag = is_weights ? "weights" : from.tag;
  const checkpoint::SaveTarget target{checkpoint::plain_path(directory), tag.empty() ? default_tag : tag,
                                      checkpoint::draw_nonce()};
  checkpoint::Manifest manifest = reader.manifest();
  manifest.world_size = 1;
  manifest.version = checkpoint::kManifestVersion;
  try {
    checkpoint::make_folders(target.directory);
    checkpoint::write_rank(target, snapshot);
    return checkpoint::commit(target, manifest, /*save_latest=*/true);
  } catch (const CheckpointError&) {
    checkpoint::abandon(target);
    throw;
  }
}

}  // namespace deeptide
