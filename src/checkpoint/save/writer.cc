// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves: the shard of one rank in the growing folder, and the commit that makes the folder a checkpoint.
#include "checkpoint/save/writer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/format/contents.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/part_folders.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/save/block_writer.h"
#include "checkpoint/save/frozen_files.h"
#include "checkpoint/save/shard_file.h"
#include "checkpoint/save/user_files.h"

namespace deeptide::checkpoint {
namespace {

// Adds the pieces that have files of their own, and writes those that have none yet. Returns the bytes written.
int64_t add_apart(const Snapshot& snapshot, const std::string& growing, int64_t buffer_bytes, RankTable& table) {
  std::vector<StoredPiece> stored = snapshot.stored;
  int64_t bytes = 0;
  for (const Piece& piece : snapshot.pieces) {
    if (!piece.apart || piece.region.numel() == 0) continue;
    stored.push_back(write_apart(growing, snapshot.rank, piece, buffer_bytes));
    bytes += stored.back().extent.offset + piece.bytes();
  }
  for (StoredPiece& piece : stored) {
    table.header_hashes[piece.extent.file] = piece.header_hash;
    declare(table.tensors, piece.id, piece.shape, piece.dtype).extents.push_back(std::move(piece.extent));
  }
  return bytes;
}

[[noreturn]] void fail_without(const std::string& path, int rank, const SaveTarget& target) {
  throw CheckpointError("cannot commit " + folder_path(target.directory, target.tag) + ": rank " +
                        std::to_string(rank) + " has no " + path +
                        "; is it on a filesystem that every rank sees, and does no other job save this tag?");
}

// Another job takes a growing folder whole, but another rank of this save may then make it again, and the table of a
// rank that was slower would stand there for files that are gone.
void check_written(const RankTable& table, const std::vector<ShardFile>& files, const SaveTarget& target, int rank) {
  for (const auto& [name, hash] : table.header_hashes) {
    const std::string path = growing_path(target) + "/" + name;
    if (!exists(path)) fail_without(path, rank, target);
  }
  for (const ShardFile& file : files) {
    if (!exists(file.path)) fail_without(file.path, rank, target);
  }
}

RankTable read_rank_table(const std::string& growing, int rank, const SaveTarget& target) {
  const std::string path = growing + "/" + rank_table_name(rank);
  if (!exists(path)) fail_without(path, rank, target);
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
  remove_with_parts(replaced);
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

// Each file goes into the growing folder, or into one of several others with a link to it there.
void place_files(const SaveTarget& target, ShardLayout& layout) {
  for (size_t part = 0; part < layout.files.size(); ++part) {
    ShardFile& file = layout.files[part];
    if (target.folders.empty()) {
      file.path = growing_path(target) + "/" + file.name;
      continue;
    }
    const std::string& folder = target.folders[part];
    make_folders(growing_parts(target, folder));
    file.path = growing_parts(target, folder) + "/" + file.name;
    link_part(target, folder, file.name);
  }
}

}  // namespace

int64_t write_rank(const SaveTarget& target, const Snapshot& snapshot, int64_t buffer_bytes) {
  const at::NoGradGuard no_grad;
  const std::string growing = growing_path(target);
  const auto parts = std::max(1, static_cast<int>(target.folders.size()));
  ShardLayout layout = lay_out(snapshot.pieces, snapshot.rank, parts,
                               {{"format", "pt"},
                                {"writer", "deeptide"},
                                {"rank", std::to_string(snapshot.rank)},
                                {"save", nonce_text(target.nonce)}});
  make_folders(growing);
  if (snapshot.rank == 0) remove_other_saves(target);
  // A table from an earlier call that failed must not vouch for a shard that this call fails to write.
  const std::string table_path = growing + "/" + rank_table_name(snapshot.rank);
  remove_quietly(table_path);
  place_files(target, layout);
  int64_t bytes = write_files(layout, buffer_bytes);
  for (const std::string& folder : target.folders) sync_folder(growing_parts(target, folder));
  RankTable table{nonce_text(target.nonce), snapshot.state, std::move(layout.table)};
  for (const ShardFile& file : layout.files) {
    table.header_hashes[file.name] = ContentHash::of(file.header.data(), std::ssize(file.header));
  }
  bytes += add_apart(snapshot, growing, buffer_bytes, table);
  write_text(table_path, encode(table));
  check_written(table, layout.files, target, snapshot.rank);
  sync_folder(growing);
  return bytes;
}

std::string commit(const SaveTarget& target, const Manifest& manifest, bool save_latest) {
  const std::string growing = growing_path(target);
  const std::string folder = folder_path(target.directory, target.tag);
  write_text(growing + "/" + kManifestName, encode(merge_ranks(growing, target, manifest)));
  remove_rank_tables(growing, manifest.world_size);
  if (exists(replaced_folder(folder))) keep_user_files(replaced_folder(folder), growing);
  if (save_latest) write_text(growing + "/" + kGrowingLatest, target.tag);
  settle_parts(target);
  sync_folder(growing);
  remove_replaced(replace_folder(growing, folder), folder);
  if (save_latest) point_latest(target, folder);
  return folder;
}

void abandon(const SaveTarget& target) {
  try {
    remove_with_parts(growing_path(target));  // it may be the one that was replaced
    remove_parts(target);
  } catch (const CheckpointError&) {  // a tag that could not be saved left nothing behind
  }
}

}  // namespace deeptide::checkpoint
