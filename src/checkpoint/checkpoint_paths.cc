// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where a checkpoint's folders and files are, and which tags may name them.
#include "checkpoint/checkpoint_paths.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "checkpoint/file_io.h"
#include "checkpoint/piece_table.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kLatest = "latest";

bool ends_with(const std::string& text, std::string_view end) { return std::string_view(text).ends_with(end); }

bool is_plain_name(const std::string& tag) {
  const bool control = std::any_of(tag.begin(), tag.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  return !tag.empty() && !control && tag != "." && tag.find('/') == std::string::npos &&
         tag.find("..") == std::string::npos;
}

}  // namespace

std::string folder_path(const std::string& directory, const std::string& tag) {
  if (directory.empty()) throw CheckpointError("the checkpoint folder's path is empty; name one, '.' for the current");
  if (!is_plain_name(tag)) {
    throw CheckpointError("the tag '" + tag +
                          "' cannot name a folder: got '/', '..', a control character or nothing, " +
                          "expected a plain name such as 'step100'");
  }
  if (tag == kLatest || ends_with(tag, ".tmp") || ends_with(tag, aside_path(""))) {
    throw CheckpointError("the tag '" + tag + "' is reserved ('latest', '*.tmp', '*" + aside_path("") +
                          "'); choose another one");
  }
  return (std::filesystem::path(directory) / tag).string();
}

std::string growing_path(const std::string& directory, const std::string& tag) {
  const std::string folder = folder_path(directory, tag);
  if (exists(folder) && !exists(folder + "/" + kManifestName)) {
    throw CheckpointError("cannot save over " + folder + ": it is not a checkpoint (no " + kManifestName +
                          " in it); choose another tag or folder");
  }
  return folder + ".tmp";
}

std::string latest_path(const std::string& directory) { return (std::filesystem::path(directory) / kLatest).string(); }

}  // namespace deeptide::checkpoint
