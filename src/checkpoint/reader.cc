// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any region of any logical tensor, from whichever shards hold it.
#include "checkpoint/reader.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/checkpoint_paths.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/transfer.h"

namespace deeptide::checkpoint {

struct Reader::Contents {
  std::string folder;
  ManifestTable table;
};

namespace {

constexpr size_t kMaxListedLines = 20;

// A crash between the two steps of a replacement leaves the old checkpoint aside.
std::string existing_folder(const std::string& directory, const std::string& tag) {
  const std::string folder = folder_path(directory, tag);
  return !exists(folder) && exists(aside_path(folder)) ? aside_path(folder) : folder;
}

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

Header read_shard_header(const std::string& path, const std::string& nonce) {
  Header header = read_header(File::open(path));
  const auto save = header.metadata.find("save");
  if (!nonce.empty() && (save == header.metadata.end() || save->second != nonce)) {
    throw CheckpointError("malformed checkpoint: " + path + " has no save " + nonce + " of " + kManifestName +
                          "; the shard is of another save, use another checkpoint");
  }
  return header;
}

void check_shards(const std::string& folder, const ManifestTable& table) {
  std::map<std::string, Header> headers;
  for (const auto& [id, logical] : table.tensors) {
    for (const Extent& extent : logical.extents) {
      const std::string path = folder + "/" + extent.file;
      auto found = headers.find(extent.file);
      if (found == headers.end()) found = headers.emplace(extent.file, read_shard_header(path, table.nonce)).first;
      check_against_header(logical, extent, found->second, path);
    }
  }
}

// The first elements of `wanted` that no shard holds. Extents do not overlap, so a count shows whether there are any.
std::optional<Region> missing_elements(const Logical& saved, const Region& wanted) {
  int64_t held = 0;
  for (const Extent& extent : saved.extents) held += num_shared(saved.shape, extent.region, wanted);
  if (held == wanted.numel()) return std::nullopt;
  std::vector<Region> regions;
  for (const Extent& extent : saved.extents) regions.push_back(extent.region);
  return first_uncovered(saved.shape, wanted, regions);
}

bool can_cast(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

std::optional<std::string> mismatch(const Table& table, const Piece& wanted) {
  const TensorId id = {wanted.name, wanted.role};
  const std::string key = tensor_key(id);
  const auto found = table.find(id);
  if (found == table.end()) return "missing in the checkpoint: '" + key + "' of shape " + shape_text(wanted.shape);
  const Logical& saved = found->second;
  if (saved.shape != wanted.shape) {
    return "shape of '" + key + "': the checkpoint has " + shape_text(saved.shape) + ", expected " +
           shape_text(wanted.shape);
  }
  const int64_t numel = numel_of(wanted.shape, key);
  const bool is_range = wanted.region.sizes.size() == 1;
  const std::string what = (is_range ? "range of '" : "region " + wanted.region.text() + " of '") + key + "': ";
  if (!fits(wanted.region, wanted.shape)) {
    return what + wanted.region.text() + " is not within its " + std::to_string(numel) + " elements";
  }
  if (wanted.data.defined() && !can_cast(saved.dtype, wanted.data.dtype())) {
    return "dtype of '" + key + "': the checkpoint has " + dtype_name(saved.dtype) + ", which is not cast to " +
           c10::toString(wanted.data.dtype());
  }
  if (const auto missing = missing_elements(saved, wanted.region)) {
    return what + "elements " + missing->text() + (is_range ? "" : " of the flattened tensor") + " are in no shard";
  }
  return std::nullopt;
}

/// What one file holds of one wanted piece.
struct Share {
  const Logical* saved;
  const Extent* extent;
  const Piece* wanted;
  int64_t first;  // shared element of the flattened tensor
};

std::vector<Share> plan_shares(const Table& table, const std::vector<Piece>& wanted) {
  std::vector<Share> shares;
  for (const Piece& piece : wanted) {
    const int64_t numel = piece.region.numel();
    if (numel == 0) continue;
    const TensorId id = {piece.name, piece.role};
    if (!piece.data.holds(numel)) {
      throw CheckpointError("cannot load '" + tensor_key(id) + "': its data is not a flat tensor of the region " +
                            piece.region.text());
    }
    const Logical& saved = table.at(id);
    for (const Extent& extent : saved.extents) {
      const int64_t first = first_shared(saved.shape, extent.region, piece.region);
      if (first >= 0) shares.push_back({&saved, &extent, &piece, first});
    }
  }
  // One file after the other, each from front to back.
  std::sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) {
    return std::tie(a.extent->file, a.extent->offset, a.first) < std::tie(b.extent->file, b.extent->offset, b.first);
  });
  return shares;
}

}  // namespace

Reader::Reader(const std::string& directory, const std::string& tag) {
  auto contents = std::make_shared<Contents>();
  contents->folder = existing_folder(directory, tag);
  const std::string path = contents->folder + "/" + kManifestName;
  contents->table = decode_manifest(read_text(path), path);
  check_shards(contents->folder, contents->table);
  contents_ = std::move(contents);
}

const Manifest& Reader::manifest() const { return contents_->table.manifest; }

std::string Reader::rank_state_json(const Coordinates& coordinates) const {
  for (const RankState& state : contents_->table.rank_states) {
    if (state.coordinates == coordinates) return state.json;
  }
  return "";
}

std::vector<std::string> Reader::check(const std::vector<Piece>& wanted, bool strict,
                                       const std::set<TensorId>& ignored) const {
  const Table& table = contents_->table.tensors;
  std::vector<std::string> lines;
  std::set<std::string> seen;  // several pieces of one tensor can have one fault
  std::set<TensorId> expected = ignored;
  for (const Piece& piece : wanted) {
    expected.insert({piece.name, piece.role});
    const auto line = mismatch(table, piece);
    if (line && seen.insert(*line).second) lines.push_back(*line);
  }
  for (const auto& [id, logical] : table) {
    if (strict && expected.count(id) == 0) {
      lines.push_back("unexpected in the checkpoint: '" + tensor_key(id) + "' of shape " + shape_text(logical.shape));
    }
  }
  return lines;
}

void Reader::read(const std::vector<Piece>& wanted) const {
  const std::vector<std::string> lines = check(wanted, false);
  if (!lines.empty()) {
    std::string text = "the checkpoint " + contents_->folder + " does not fit what is to be loaded:";
    for (size_t i = 0; i < std::min(lines.size(), kMaxListedLines); ++i) text += "\n  " + lines[i];
    if (lines.size() > kMaxListedLines) text += "\n  and " + std::to_string(lines.size() - kMaxListedLines) + " more";
    throw CheckpointError(text);
  }
  const at::NoGradGuard no_grad;
  std::optional<File> file;
  for (const Share& share : plan_shares(contents_->table.tensors, wanted)) {
    const std::string path = contents_->folder + "/" + share.extent->file;
    if (!file || file->path() != path) file.emplace(File::open(path));
    transfer(*file, *share.saved, *share.extent, *share.wanted);
  }
}

std::vector<Piece> Reader::table() const {
  std::vector<Piece> pieces;
  for (const auto& [id, logical] : contents_->table.tensors) {
    pieces.push_back({id.name,
                      id.role,
                      logical.shape,
                      Region::range(0, numel_of(logical.shape, id.name)),
                      {logical.dtype, nullptr}});
  }
  return pieces;
}

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
