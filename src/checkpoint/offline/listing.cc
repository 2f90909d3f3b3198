// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lists the checkpoints of a folder, and removes those that nobody asked to keep.
#include <sys/stat.h>

#include <algorithm>
#include <tuple>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/retention.h"
#include "checkpoint/offline/writers/parts.h"
#include "deeptide/errors.h"

namespace deeptide {

namespace {

using checkpoint::Contents;

CheckpointSummary summarize(const std::string& directory, const std::string& tag) {
  CheckpointSummary summary;
  summary.tag = tag;
  const std::string folder = directory + "/" + tag;
  struct stat status;
  if (::stat((folder + "/" + checkpoint::kManifestName).c_str(), &status) == 0) summary.saved_at_s = status.st_mtime;
  try {
    const Contents contents = checkpoint::read_manifest(folder);
    summary.global_steps = checkpoint::global_steps_of(contents.table.manifest);
    summary.world_size = contents.table.manifest.world_size;
    summary.num_tensors = std::ssize(contents.table.tensors);
    summary.has_hashes = !contents.table.header_hashes.empty();
    for (const auto& [id, logical] : contents.table.tensors) {
      summary.bytes += checkpoint::numel_of(logical.shape, logical.key) * checkpoint::element_bytes(logical.dtype);
    }
  } catch (const CheckpointError& error) {
    summary.fault = error.what();
  }
  return summary;
}

// A save that grows, or one that was replaced, is no checkpoint.
bool can_be_tag(const std::string& directory, const std::string& name) {
  try {
    return checkpoint::exists(checkpoint::folder_path(directory, name) + "/" + checkpoint::kManifestName);
  } catch (const CheckpointError&) {
    return false;
  }
}

}  // namespace

std::vector<CheckpointSummary> list_checkpoints(const std::string& directory) {
  const std::string latest = checkpoint::latest_tag(directory);
  std::vector<CheckpointSummary> found;
  for (const std::string& name : checkpoint::list_folder(directory)) {
    if (!can_be_tag(directory, name)) continue;
    found.push_back(summarize(directory, name));
    if (!found.back().fault.empty() && !can_be_tag(directory, name)) {  // removed meanwhile
      found.pop_back();
      continue;
    }
    found.back().is_latest = name == latest;
  }
  std::sort(found.begin(), found.end(), [](const CheckpointSummary& a, const CheckpointSummary& b) {
    return std::tie(a.global_steps, a.saved_at_s, a.tag) < std::tie(b.global_steps, b.saved_at_s, b.tag);
  });
  return found;
}

std::vector<std::string> prune_checkpoints(const std::string& directory, const PruneOptions& options) {
  if (options.keep_last < 1 || options.keep_every < 0) {
    throw ConfigError("prune: got keep_last " + std::to_string(options.keep_last) + " and keep_every " +
                      std::to_string(options.keep_every) + ", expected at least 1, and 0 or more");
  }
  std::vector<checkpoint::SavedStep> saved;
  for (const CheckpointSummary& found : list_checkpoints(directory)) {
    if (found.fault.empty() && found.global_steps >= 0) saved.push_back({found.global_steps, found.tag});
  }
  const std::vector<std::string> going =
      superfluous(saved, {options.keep_last, options.keep_every}, {checkpoint::latest_tag(directory)});
  for (const std::string& tag : going) {
    if (!options.dry_run) checkpoint::remove_checkpoint(directory, tag);
  }
  return going;
}

}  // namespace deeptide
