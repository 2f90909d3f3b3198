// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks a manifest against the headers of its shards.
#include "checkpoint/format/contents.h"

#include <map>
#include <set>
#include <utility>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {
namespace {

constexpr size_t kNamedTensors = 3;

// Manifest and shard describe the same region independently, so they must agree.
void check_against_header(const Logical& logical, const Extent& extent, const Header& header, const std::string& path) {
  auto found = header.entries.find(region_key(logical.key, extent.region));
  if (found == header.entries.end()) found = header.entries.find(logical.key);
  if (found == header.entries.end() || found->second.dtype != logical.dtype ||
      found->second.shape != extent.region.sizes || found->second.begin + header.data_offset != extent.offset) {
    throw CheckpointError("malformed checkpoint: elements " + extent.region.text() + " of '" + logical.key +
                          "' are not where " + kManifestName + " expects them in " + path +
                          "; the shard is of another save, use another checkpoint");
  }
}

void check_header_hash(const File& file, const Header& header, const ContentHash& expected) {
  std::string text(static_cast<size_t>(header.data_offset), '\0');
  file.read_at(text.data(), header.data_offset, 0);
  if (ContentHash::of(text.data(), header.data_offset) == expected) return;
  throw CheckpointError(
      "malformed checkpoint: the header of " + file.path() +
      " is not the one that was written; the shard is of another save or was changed, use another checkpoint");
}

Header read_shard_header(const std::string& path, const std::string& name, const ManifestTable& table) {
  const File file = File::open(path);
  Header header = read_header(file);
  const auto save = header.metadata.find("save");
  // A frozen file is older than the save: the hash of its header tells it.
  if (!table.nonce.empty() && !is_frozen_name(name) && (save == header.metadata.end() || save->second != table.nonce)) {
    throw CheckpointError("malformed checkpoint: " + path + " has no save " + table.nonce + " of " + kManifestName +
                          "; the shard is of another save, use another checkpoint");
  }
  const auto hash = table.header_hashes.find(name);
  if (hash != table.header_hashes.end()) check_header_hash(file, header, hash->second);
  return header;
}

using Extents = std::vector<std::pair<const Logical*, const Extent*>>;

std::map<std::string, Extents> extents_by_shard(const ManifestTable& table) {
  std::map<std::string, Extents> shards;
  for (const auto& [file, hash] : table.header_hashes) shards[file];  // those without a piece as well
  for (const auto& [id, logical] : table.tensors) {
    for (const Extent& extent : logical.extents) shards[extent.file].emplace_back(&logical, &extent);
  }
  return shards;
}

// " (it has 'a/master', 'b/master', 'c/master' and 12 more)"
std::string tensors_text(const Extents& extents) {
  std::set<std::string> keys;
  for (const auto& [logical, extent] : extents) keys.insert(logical->key);
  std::string text;
  size_t named = 0;
  for (const std::string& key : keys) {
    if (named++ == kNamedTensors) return text + " and " + std::to_string(keys.size() - kNamedTensors) + " more)";
    text += (text.empty() ? " (it has '" : ", '") + key + "'";
  }
  return text.empty() ? "" : text + ")";
}

}  // namespace

std::string existing_folder(const std::string& directory, const std::string& tag) {
  const std::string folder = folder_path(directory, tag);
  return !exists(folder) && exists(aside_path(folder)) ? aside_path(folder) : folder;
}

Contents read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  return {folder, decode_manifest(read_text(path), path)};
}

std::vector<std::string> shard_faults(const Contents& contents) {
  std::vector<std::string> faults;
  for (const auto& [file, extents] : extents_by_shard(contents.table)) {
    const std::string path = contents.folder + "/" + file;
    if (contents.of_one_host && !exists(path)) continue;
    Header header;
    try {
      header = read_shard_header(path, file, contents.table);
    } catch (const CheckpointError& error) {
      faults.push_back(error.what() + tensors_text(extents));
      continue;
    }
    for (const auto& [logical, extent] : extents) {
      try {
        check_against_header(*logical, *extent, header, path);
      } catch (const CheckpointError& error) {
        faults.emplace_back(error.what());
      }
    }
  }
  return faults;
}

namespace {

Contents without_faults(Contents contents) {
  const std::vector<std::string> faults = shard_faults(contents);
  if (!faults.empty()) throw CheckpointError(faults.front());
  return contents;
}

}  // namespace

Contents contents_of_host(const std::string& folder, ManifestTable table) {
  return without_faults({folder, std::move(table), /*of_one_host=*/true});
}

Contents open_contents(const std::string& folder) { return without_faults(read_manifest(folder)); }

std::string latest_tag(const std::string& directory) {
  const std::string path = latest_path(directory);
  if (!exists(path)) return "";
  std::string tag = read_text(path);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r')) tag.pop_back();
  try {
    folder_path(directory, tag);
  } catch (const CheckpointError& error) {
    throw CheckpointError("malformed " + path + ": " + error.what());
  }
  return tag;
}

}  // namespace deeptide::checkpoint
