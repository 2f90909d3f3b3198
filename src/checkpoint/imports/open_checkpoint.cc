// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells formats apart by their folders.
#include "checkpoint/imports/open_checkpoint.h"

#include <utility>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/contents.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/imports/deepspeed_folder.h"
#include "checkpoint/imports/deepspeed_state.h"
#include "checkpoint/imports/deepspeed_tensors.h"
#include "checkpoint/imports/master_check.h"
#include "checkpoint/imports/weights/weight_places.h"
#include "checkpoint/load/other_folders.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kUniversalTag = "latest_universal";

/// DeepSpeed's checkpoint as tables of ours.
ManifestTable read_deepspeed(const std::string& path) {
  const DeepspeedModel model(path);
  const OptimizerInfo* optimizer = optimizer_of(model.first());
  ForeignTable table(optimizer);
  if (model.folder().universal) {
    read_universal_states(model, table);
  } else if (!model.folder().parts.front().optimizers.empty()) {
    read_zero_partitions(model, table);
  } else {
    read_unsharded_states(model, table);
  }
  read_module(model, table);
  ManifestTable contents;
  contents.manifest = deepspeed_manifest(model.folder(), model.first(), table.steps(), optimizer);
  contents.tensors = table.finish(path);
  check_masters(model, Reader(path, contents));
  return contents;
}

}  // namespace

std::optional<ManifestTable> foreign_contents(const std::string& folder) {
  if (exists(folder + "/" + kManifestName) || !is_deepspeed_folder(folder)) return std::nullopt;
  return read_deepspeed(folder);
}

Reader open_checkpoint(const std::string& directory, const std::string& tag, const std::set<std::string>& names) {
  if (tag == kWeightsTag) {
    WeightPlaces places = find_weights(directory);
    fit_names(places, names);
    return {places.folder, weights_table(places)};
  }
  const std::string folder = existing_folder(directory, tag);
  if (exists(folder + "/" + kManifestName)) return {directory, tag};
  if (auto foreign = foreign_contents(folder)) return {folder, *std::move(foreign)};
  if (!exists(folder)) throw CheckpointError("no checkpoint '" + tag + "' in " + directory + tags_in(directory));
  throw CheckpointError("no checkpoint in " + folder + ", which has no " + kManifestName + other_contents(folder));
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
