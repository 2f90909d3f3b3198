// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Knows formats by the names of their files.
#include "checkpoint/load/other_folders.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/contents.h"
#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {
namespace {

constexpr size_t kNamedTags = 5;
constexpr const char* kWeightFiles[] = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                                        "pytorch_model.bin.index.json"};

bool is_checkpoint(const std::string& path) { return exists(path + "/" + kManifestName) || is_deepspeed_folder(path); }

}  // namespace

bool is_deepspeed_folder(const std::string& path) {
  if (!is_folder(path)) return false;
  for (const std::string& name : list_folder(path)) {
    if (name.ends_with("model_states.pt") || name.ends_with("_optim_states.pt")) return true;
  }
  return exists(path + "/zero/optimizer_state.pt");
}

bool has_weights(const std::string& path) {
  const bool is_file = exists(path) && !is_folder(path);
  return is_file || std::any_of(std::begin(kWeightFiles), std::end(kWeightFiles),
                                [&](const std::string& name) { return exists(path + "/" + name); });
}

std::string other_contents(const std::string& path) {
  if (is_checkpoint(path)) {
    const std::filesystem::path itself = plain_path(path);
    return ": it is a checkpoint itself; give the folder that has it, " + itself.parent_path().string() +
           ", and its tag, '" + itself.filename().string() + "'";
  }
  if (exists(path + "/.metadata")) {
    return ": it is one of torch.distributed.checkpoint, which is not read here; load it with "
           "torch.distributed.checkpoint, or export the checkpoint that it was made from as universal";
  }
  if (has_weights(path)) {
    return ": it holds weights alone; load them with load_module_only=True, or make a checkpoint of them with "
           "'deeptide checkpoint import'";
  }
  if (exists(path + "/latest_universal")) {
    return ": it has a universal one of DeepSpeed's; set \"checkpoint\": {\"load_universal\": true}, or give its tag";
  }
  return "";
}

std::string tags_in(const std::string& directory) {
  if (!is_folder(directory)) return "";
  std::vector<std::string> tags;
  for (const std::string& name : list_folder(directory)) {
    if (!name.ends_with(".tmp") && is_checkpoint(directory + "/" + name)) tags.push_back(name);
  }
  std::sort(tags.begin(), tags.end());
  std::string text;
  for (size_t i = 0; i < std::min(tags.size(), kNamedTags); ++i) text += (i == 0 ? "'" : ", '") + tags[i] + "'";
  if (tags.size() > kNamedTags) text += ", …";
  return text.empty() ? "" : "; it has the checkpoints " + text + ": give one of these tags";
}

}  // namespace deeptide::checkpoint
