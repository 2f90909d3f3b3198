// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves: a rank's pieces into the growing folder, and the commit that makes the folder a checkpoint.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/block_writer.h"
#include "checkpoint/checkpoint_paths.h"
#include "checkpoint/file_io.h"
#include "checkpoint/piece_table.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_file.h"

namespace deeptide::checkpoint {
namespace {

void check_piece(const Piece& piece) {
  const std::string what = "cannot save '" + tensor_key(piece.name, piece.role) + "': ";
  if (piece.role.empty() || piece.role.find_first_of("/@") != std::string::npos) {
    throw CheckpointError(what + "the role '" + piece.role + "' is empty or has '/' or '@'");
  }
  const std::string range = "[" + std::to_string(piece.begin) + ", " + std::to_string(piece.end) + ")";
  const int64_t numel = numel_of(piece.shape, "shape of '" + piece.name + "'");
  if (piece.begin < 0 || piece.end < piece.begin || piece.end > numel) {
    throw CheckpointError(what + "the range " + range + " is not within its " + std::to_string(numel) + " elements");
  }
  if (!piece.data.defined() || piece.data.numel() != piece.end - piece.begin ||
      (piece.data.dim() != 1 && !piece.data.is_contiguous())) {
    throw CheckpointError(what + "its data is not a flat tensor of the range " + range);
  }
}

// What goes into the file, in its order: wide dtypes first, so that each piece is aligned for its dtype.
std::vector<const Piece*> in_file_order(const std::vector<Piece>& pieces) {
  std::vector<const Piece*> order;
  for (const Piece& piece : pieces) {
    check_piece(piece);
    if (piece.begin < piece.end) order.push_back(&piece);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Piece* a, const Piece* b) { return a->data.element_size() > b->data.element_size(); });
  return order;
}

struct Layout {
  Table table;
  Entries entries;
};

Layout lay_out(const std::vector<Piece>& pieces, const std::vector<const Piece*>& order, const std::string& file) {
  Layout layout;
  for (const Piece& piece : pieces) {
    declare(layout.table, {piece.name, piece.role, piece.shape, piece.data.scalar_type(), {}});
  }
  std::map<std::string, int> ranges;
  for (const Piece* piece : order) ++ranges[tensor_key(piece->name, piece->role)];
  int64_t end = 0;
  for (const Piece* piece : order) {
    const std::string key = tensor_key(piece->name, piece->role);
    const int64_t begin = std::exchange(end, end + static_cast<int64_t>(piece->data.nbytes()));
    layout.entries[ranges[key] > 1 ? range_key(key, piece->begin) : key] = {
        piece->data.scalar_type(), {piece->data.numel()}, begin, end};
    layout.table.at(key).extents.push_back({piece->begin, piece->end, file, begin});
  }
  check_extents(layout.table, "cannot save");
  return layout;
}

ManifestTable merge_ranks(const std::string& growing, const Manifest& manifest) {
  ManifestTable merged;
  merged.manifest = manifest;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    const std::string path = growing + "/" + rank_table_name(rank);
    RankTable table = decode_rank_table(read_text(path), path);
    merged.rank_states.push_back(std::move(table.state_json));
    for (auto& [key, logical] : table.tensors) {
      Logical& into = declare(merged.tensors, logical);
      into.extents.insert(into.extents.end(), logical.extents.begin(), logical.extents.end());
    }
  }
  check_extents(merged.tensors, "cannot save");
  return merged;
}

// The ranks' tables, and what a crashed save of a larger world left.
void remove_extra_files(const std::string& growing, int world_size) {
  std::set<std::string> shards;
  for (int rank = 0; rank < world_size; ++rank) shards.insert(shard_name(rank));
  for (const std::string& name : list_folder(growing)) {
    if (std::string_view(name).starts_with("rank_") && shards.count(name) == 0) remove_quietly(growing + "/" + name);
  }
}

void point_latest(const std::string& directory, const std::string& tag) {
  const std::string path = latest_path(directory);
  write_text(path + ".tmp", tag);
  move_path(path + ".tmp", path);
  sync_folder(directory);
}

}  // namespace

void write_rank(const std::string& directory, const std::string& tag, int rank, const std::vector<Piece>& pieces,
                const std::string& rank_state_json) {
  const at::NoGradGuard no_grad;
  const std::string growing = growing_path(directory, tag);
  const std::vector<const Piece*> order = in_file_order(pieces);
  Layout layout = lay_out(pieces, order, shard_name(rank));
  const std::string header =
      encode_header(layout.entries, {{"format", "pt"}, {"writer", "deeptide"}, {"rank", std::to_string(rank)}});
  for (auto& [key, logical] : layout.table) {
    for (Extent& extent : logical.extents) extent.offset += static_cast<int64_t>(header.size());
  }
  const std::string table_text = encode(RankTable{rank_state_json, std::move(layout.table)});

  make_folders(growing);
  // A table from an earlier, failed save must not vouch for a shard that this one fails to write.
  const std::string table_path = growing + "/" + rank_table_name(rank);
  remove_quietly(table_path);
  BlockWriter writer(File::create(growing + "/" + shard_name(rank)));
  writer.append(header.data(), static_cast<int64_t>(header.size()));
  for (const Piece* piece : order) writer.append(piece->data);
  writer.finish();
  write_text(table_path, table_text);
  sync_folder(growing);
}

std::string commit(const std::string& directory, const std::string& tag, const Manifest& manifest, bool save_latest) {
  const std::string growing = growing_path(directory, tag);
  const std::string folder = folder_path(directory, tag);
  write_text(growing + "/" + kManifestName, encode(merge_ranks(growing, manifest)));
  remove_extra_files(growing, manifest.world_size);
  sync_folder(growing);
  replace_folder(growing, folder);
  if (save_latest) point_latest(directory, tag);
  return folder;
}

void abandon(const std::string& directory, const std::string& tag) {
  try {
    remove_quietly(growing_path(directory, tag));
  } catch (const CheckpointError&) {  // a tag that could not be saved left nothing behind
  }
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
