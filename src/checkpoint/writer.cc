// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves: the shard of one rank in the growing folder, and the commit that makes the folder a checkpoint.
#include "checkpoint/writer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/block_writer.h"
#include "checkpoint/contents.h"
#include "checkpoint/file_io.h"
#include "checkpoint/frozen_files.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/user_files.h"

namespace deeptide::checkpoint {
namespace {

void check_piece(const Piece& piece) {
  const std::string what = "cannot save '" + tensor_key({piece.name, piece.role}) + "': ";
  const int64_t numel = numel_of(piece.shape, "shape of '" + piece.name + "'");
  if (!fits(piece.region, piece.shape)) {
    throw CheckpointError(what + "the region " + piece.region.text() + " is not within its shape " +
                          shape_text(piece.shape) + " of " + std::to_string(numel) + " elements");
  }
  if (!piece.data.holds(piece.region.numel())) {
    throw CheckpointError(what + "its data is not a flat tensor of the region " + piece.region.text());
  }
}

int64_t width_of(const Piece& piece) { return static_cast<int64_t>(c10::elementSize(piece.data.dtype())); }

// The pieces with elements in the order of the file: wide dtypes first, so that each piece is aligned for its dtype.
std::vector<const Piece*> in_file_order(const std::vector<Piece>& pieces) {
  std::vector<const Piece*> order;
  for (const Piece& piece : pieces) {
    check_piece(piece);
    if (piece.region.numel() > 0 && !piece.apart) order.push_back(&piece);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Piece* a, const Piece* b) { return width_of(*a) > width_of(*b); });
  return order;
}

struct Layout {
  Table table;
  Entries entries;
};

Layout lay_out(const std::vector<Piece>& pieces, const std::vector<const Piece*>& order, const std::string& file) {
  Layout layout;
  for (const Piece& piece : pieces) {
    declare(layout.table, {piece.name, piece.role}, piece.shape, piece.data.dtype());
  }
  std::map<TensorId, int> counts;
  for (const Piece* piece : order) ++counts[{piece->name, piece->role}];
  int64_t end = 0;
  for (const Piece* piece : order) {
    const TensorId id = {piece->name, piece->role};
    const int64_t begin = std::exchange(end, end + piece->region.numel() * width_of(*piece));
    const std::string key = tensor_key(id);
    layout.entries[counts[id] > 1 ? region_key(key, piece->region) : key] = {piece->data.dtype(), piece->region.sizes,
                                                                             begin, end};
    layout.table.at(id).extents.push_back({piece->region, file, begin});
  }
  check_extents(layout.table, "cannot save");
  return layout;
}

// Appends the pieces, the first at `offset`, and notes their hashes in the table.
void write_pieces(const std::vector<const Piece*>& order, int64_t offset, BlockWriter& writer, Table& table) {
  for (const Piece* piece : order) {
    writer.append(piece->data, piece->region.numel());
    for (Extent& extent : table.at({piece->name, piece->role}).extents) {
      if (extent.offset == offset) extent.hashes = writer.take_hashes();
    }
    offset += piece->region.numel() * width_of(*piece);
  }
}

// Adds the pieces that have files of their own, and writes those that have none yet. Returns the bytes written.
int64_t add_apart(const Snapshot& snapshot, const std::string& growing, int64_t buffer_bytes, RankTable& table) {
  std::vector<StoredPiece> stored = snapshot.stored;
  int64_t bytes = 0;
  for (const Piece& piece : snapshot.pieces) {
    if (!piece.apart || piece.region.numel() == 0) continue;
    stored.push_back(write_apart(growing, snapshot.rank, piece, buffer_bytes));
    bytes += stored.back().extent.offset + piece.region.numel() * width_of(piece);
  }
  for (StoredPiece& piece : stored) {
    table.header_hashes[piece.extent.file] = piece.header_hash;
    declare(table.tensors, piece.id, piece.shape, piece.dtype).extents.push_back(std::move(piece.extent));
  }
  return bytes;
}

RankTable read_rank_table(const std::string& growing, int rank, const SaveTarget& target) {
  const std::string path = growing + "/" + rank_table_name(rank);
  if (!exists(path)) {
    throw CheckpointError("cannot commit " + folder_path(target.directory, target.tag) + ": rank " +
                          std::to_string(rank) + " has no " + path +
                          "; is it on a filesystem that every rank sees, and does no other job save this tag?");
  }
  RankTable table = decode_rank_table(read_text(path), path);
  if (table.nonce != nonce_text(target.nonce)) {
    throw CheckpointError("cannot commit " + folder_path(target.directory, target.tag) + ": " + path + " is of save " +
                          table.nonce + ", expected " + nonce_text(target.nonce) +
                          "; give each job a folder of its own");
  }
  return table;
}

ManifestTable merge_ranks(const std::string& growing, const SaveTarget& target, const Manifest& manifest) {
  ManifestTable merged{manifest, nonce_text(target.nonce), {}, {}};
  std::set<Coordinates> seen;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    RankTable table = read_rank_table(growing, rank, target);
    if (!seen.insert(table.state.coordinates).second) {
      throw CheckpointError("cannot commit: rank " + std::to_string(rank) + " and another rank are both at mesh " +
                            "coordinates " + table.state.coordinates.text());
    }
    merged.rank_states.push_back(std::move(table.state));
    merged.header_hashes.merge(table.header_hashes);
    for (auto& [id, logical] : table.tensors) {
      Logical& into = declare(merged.tensors, id, logical.shape, logical.dtype);
      into.extents.insert(into.extents.end(), logical.extents.begin(), logical.extents.end());
    }
  }
  check_extents(merged.tensors, "cannot save");
  return merged;
}

void remove_rank_tables(const std::string& growing, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) remove_quietly(growing + "/" + rank_table_name(rank));
}

// The folder that the growing one replaces. A crash between the two steps of a replacement leaves it aside.
std::string replaced_folder(const std::string& folder) { return exists(folder) ? folder : aside_path(folder); }

// Removes a replaced folder, after what the user put there during the save was kept too.
void remove_replaced(const std::string& replaced, const std::string& folder) {
  if (replaced.empty()) return;
  try {
    keep_user_files(replaced, folder);
  } catch (const CheckpointError&) {
    return;  // the checkpoint stands; the files stay where they are until the next save of the tag
  }
  remove_quietly(replaced);
}

// The commit writes its file in the tag's folder: a crash leaves nothing beside it.
void point_latest(const SaveTarget& target, const std::string& folder) {
  const std::string from = folder + "/" + kGrowingLatest;
  try {
    move_path(from, latest_path(target.directory));
  } catch (const CheckpointError&) {
    // Another save of the tag has taken it.
    if (exists(from) || latest_tag(target.directory) != target.tag) throw;
  }
  sync_folder(target.directory);
}

}  // namespace

int64_t write_rank(const SaveTarget& target, const Snapshot& snapshot, int64_t buffer_bytes) {
  const at::NoGradGuard no_grad;
  const std::string growing = growing_path(target);
  const std::vector<const Piece*> order = in_file_order(snapshot.pieces);
  Layout layout = lay_out(snapshot.pieces, order, shard_name(snapshot.rank));
  const std::string header = encode_header(layout.entries, {{"format", "pt"},
                                                            {"writer", "deeptide"},
                                                            {"rank", std::to_string(snapshot.rank)},
                                                            {"save", nonce_text(target.nonce)}});
  for (auto& [id, logical] : layout.table) {
    for (Extent& extent : logical.extents) extent.offset += static_cast<int64_t>(header.size());
  }

  make_folders(growing);
  if (snapshot.rank == 0) remove_other_saves(target);
  // A table from an earlier call that failed must not vouch for a shard that this call fails to write.
  const std::string table_path = growing + "/" + rank_table_name(snapshot.rank);
  remove_quietly(table_path);
  BlockWriter writer(growing + "/" + shard_name(snapshot.rank), buffer_bytes);
  writer.append(header.data(), static_cast<int64_t>(header.size()));
  writer.take_hashes();  // the header has one of its own, whatever its size
  RankTable table{nonce_text(target.nonce),
                  snapshot.state,
                  std::move(layout.table),
                  {{shard_name(snapshot.rank), ContentHash::of(header.data(), static_cast<int64_t>(header.size()))}}};
  write_pieces(order, static_cast<int64_t>(header.size()), writer, table.tensors);
  writer.finish();
  const int64_t apart_bytes = add_apart(snapshot, growing, buffer_bytes, table);
  write_text(table_path, encode(table));
  sync_folder(growing);
  return writer.written_bytes() + apart_bytes;
}

std::string commit(const SaveTarget& target, const Manifest& manifest, bool save_latest) {
  const std::string growing = growing_path(target);
  const std::string folder = folder_path(target.directory, target.tag);
  write_text(growing + "/" + kManifestName, encode(merge_ranks(growing, target, manifest)));
  remove_rank_tables(growing, manifest.world_size);
  if (exists(replaced_folder(folder))) keep_user_files(replaced_folder(folder), growing);
  if (save_latest) write_text(growing + "/" + kGrowingLatest, target.tag);
  sync_folder(growing);
  remove_replaced(replace_folder(growing, folder), folder);
  if (save_latest) point_latest(target, folder);
  return folder;
}

void abandon(const SaveTarget& target) {
  try {
    remove_quietly(growing_path(target));
  } catch (const CheckpointError&) {  // a tag that could not be saved left nothing behind
  }
}

}  // namespace deeptide::checkpoint
