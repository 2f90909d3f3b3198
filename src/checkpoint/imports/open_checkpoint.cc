// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells formats apart by their folders, and copies between them region by region.
#include "checkpoint/imports/open_checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/imports/deepspeed_folder.h"
#include "checkpoint/imports/deepspeed_state.h"
#include "checkpoint/imports/deepspeed_tensors.h"
#include "checkpoint/imports/weight_places.h"
#include "checkpoint/save/writer.h"
#include "deeptide/weights.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kUniversalTag = "latest_universal";
constexpr const char* kWeightsTag = ".";  // no checkpoint has it: folder_path() refuses it

Reader read_deepspeed(const std::string& path) {
  const DeepspeedFolder folder = list_deepspeed_folder(path);
  const TorchFile model(folder.file(folder.models.front()));
  const OptimizerInfo* optimizer = optimizer_of(model);
  ForeignTable table(optimizer);
  if (folder.universal) {
    read_universal_states(folder, model, table);
  } else if (!folder.optimizers.empty()) {
    read_zero_partitions(folder, model, table);
  } else {
    read_unsharded_states(model, folder.models.front(), table);
  }
  read_module(folder, model, table);
  ManifestTable contents;
  contents.manifest = deepspeed_manifest(folder, model, table.steps(), optimizer);
  contents.tensors = table.finish(path);
  return {path, std::move(contents)};
}

}  // namespace

Reader open_checkpoint(const std::string& directory, const std::string& tag) {
  if (tag == kWeightsTag) return {directory, weights_table(find_weights(directory))};
  const std::string folder = folder_path(directory, tag);
  if (!exists(folder + "/" + kManifestName) && is_deepspeed_folder(folder)) return read_deepspeed(folder);
  return {directory, tag};
}

std::string tag_of_weights(const std::string& directory) {
  return latest_tag(directory).empty() && has_weights(directory) ? kWeightsTag : "";
}

std::string tag_to_load(const std::string& directory, bool universal) {
  const std::string path = directory + "/" + kUniversalTag;
  if (!universal || !exists(path)) return latest_tag(directory);
  std::string tag = read_text(path);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r')) tag.pop_back();
  folder_path(directory, tag);
  return tag;
}

}  // namespace deeptide::checkpoint

namespace deeptide {

using checkpoint::Piece;
using checkpoint::Region;

std::string import_checkpoint(const std::string& source, const std::string& directory, const std::string& source_tag,
                              const std::string& tag) {
  const at::NoGradGuard no_grad;
  const std::string from = source_tag.empty() ? checkpoint::tag_to_load(source, /*universal=*/true) : source_tag;
  if (from.empty()) {
    throw CheckpointError("no checkpoint in " + source + ": it has no file 'latest'; name the tag's folder in it");
  }
  const checkpoint::Reader reader = checkpoint::open_checkpoint(source, from);
  checkpoint::Snapshot snapshot;
  const auto files = reader.announce_all();
  for (Piece& piece : reader.table()) {
    const Piece whole = piece;
    const auto dtype = piece.data.dtype();
    const auto copy = [&reader, &files, whole](int64_t begin, const at::Tensor& block) {
      Piece part = whole;
      part.region = Region::range(begin, begin + block.numel());
      part.data = block;
      reader.read({part}, *files);
    };
    piece.data = checkpoint::PieceData(dtype, copy);
    snapshot.pieces.push_back(std::move(piece));
  }
  const checkpoint::SaveTarget target{directory, tag.empty() ? from : tag, checkpoint::draw_nonce()};
  checkpoint::Manifest manifest = reader.manifest();
  manifest.world_size = 1;
  manifest.version = checkpoint::kManifestVersion;
  try {
    checkpoint::make_folders(directory);
    checkpoint::write_rank(target, snapshot);
    return checkpoint::commit(target, manifest, /*save_latest=*/true);
  } catch (const CheckpointError&) {
    checkpoint::abandon(target);
    throw;
  }
}

}  // namespace deeptide
