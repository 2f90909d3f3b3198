// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any range of any logical tensor, from whichever shards hold it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/block_writer.h"
#include "checkpoint/checkpoint_paths.h"
#include "checkpoint/file_io.h"
#include "checkpoint/piece_table.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_file.h"

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

// Two descriptions of one shard, by two hands: they must say the same.
void check_against_header(const std::string& key, const Logical& logical, const Extent& extent, const Header& header,
                          const std::string& path) {
  auto found = header.entries.find(range_key(key, extent.begin));
  if (found == header.entries.end()) found = header.entries.find(key);
  if (found == header.entries.end() || found->second.dtype != logical.dtype ||
      found->second.shape != std::vector<int64_t>{extent.end - extent.begin} ||
      found->second.begin + header.data_offset != extent.offset) {
    throw CheckpointError("malformed checkpoint: elements [" + std::to_string(extent.begin) + ", " +
                          std::to_string(extent.end) + ") of '" + key + "' are not where " + kManifestName +
                          " expects them in " + path + "; the shard is of another save, use another checkpoint");
  }
}

void check_shards(const std::string& folder, const Table& table) {
  std::map<std::string, Header> headers;
  for (const auto& [key, logical] : table) {
    for (const Extent& extent : logical.extents) {
      const std::string path = folder + "/" + extent.file;
      auto found = headers.find(extent.file);
      if (found == headers.end()) found = headers.emplace(extent.file, read_header(File::open(path))).first;
      check_against_header(key, logical, extent, found->second, path);
    }
  }
}

std::string range_text(int64_t begin, int64_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// Calls visit(extent, from, to) for each saved part [from, to) of the range, in order.
template <typename Visit>
void for_each_part(const Logical& logical, int64_t begin, int64_t end, Visit visit) {
  auto extent = std::partition_point(logical.extents.begin(), logical.extents.end(),
                                     [&](const Extent& candidate) { return candidate.end <= begin; });
  for (; extent != logical.extents.end() && extent->begin < end; ++extent) {
    visit(*extent, std::max(begin, extent->begin), std::min(end, extent->end));
  }
}

// The first part of the range that no shard holds.
std::optional<std::string> missing_range(const Logical& logical, int64_t begin, int64_t end) {
  int64_t reached = begin;
  std::optional<std::string> missing;
  for_each_part(logical, begin, end, [&](const Extent&, int64_t from, int64_t to) {
    if (!missing && from > reached) missing = range_text(reached, from);
    reached = to;
  });
  if (!missing && reached < end) missing = range_text(reached, end);
  return missing;
}

bool can_cast(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

std::optional<std::string> mismatch(const Table& table, const Piece& wanted) {
  const std::string key = tensor_key(wanted.name, wanted.role);
  const auto found = table.find(key);
  if (found == table.end()) return "missing in the checkpoint: '" + key + "' of shape " + shape_text(wanted.shape);
  const Logical& saved = found->second;
  if (saved.shape != wanted.shape) {
    return "shape of '" + key + "': the checkpoint has " + shape_text(saved.shape) + ", expected " +
           shape_text(wanted.shape);
  }
  const int64_t numel = numel_of(wanted.shape, key);
  if (wanted.begin < 0 || wanted.end < wanted.begin || wanted.end > numel) {
    return "range of '" + key + "': " + range_text(wanted.begin, wanted.end) + " is not within its " +
           std::to_string(numel) + " elements";
  }
  const at::Tensor& data = wanted.data;
  if (data.defined() && !can_cast(saved.dtype, data.scalar_type())) {
    return "dtype of '" + key + "': the checkpoint has " + dtype_name(saved.dtype) + ", which is not cast to " +
           c10::toString(data.scalar_type());
  }
  if (const auto missing = missing_range(saved, wanted.begin, wanted.end)) {
    return "range of '" + key + "': elements " + *missing + " are in no shard";
  }
  return std::nullopt;
}

struct Transfer {
  std::string file;
  int64_t offset;  // bytes in the file
  int64_t count;   // elements
  at::ScalarType dtype;
  at::Tensor into;  // (count,)
};

std::vector<Transfer> plan_transfers(const Table& table, const std::vector<Piece>& wanted) {
  std::vector<Transfer> transfers;
  for (const Piece& piece : wanted) {
    if (piece.begin == piece.end) continue;
    const std::string key = tensor_key(piece.name, piece.role);
    const at::Tensor& data = piece.data;
    if (!data.defined() || data.numel() != piece.end - piece.begin || (data.dim() != 1 && !data.is_contiguous())) {
      throw CheckpointError("cannot load '" + key + "': its data is not a flat tensor of the range " +
                            range_text(piece.begin, piece.end));
    }
    const at::Tensor flat = data.view({-1});
    const Logical& logical = table.at(key);
    const int64_t width = static_cast<int64_t>(c10::elementSize(logical.dtype));
    for_each_part(logical, piece.begin, piece.end, [&](const Extent& extent, int64_t from, int64_t to) {
      transfers.push_back({extent.file, extent.offset + (from - extent.begin) * width, to - from, logical.dtype,
                           flat.narrow(0, from - piece.begin, to - from)});
    });
  }
  // One file after the other, each from front to back.
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
  return transfers;
}

void run_transfer(const File& file, const Transfer& transfer) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(transfer.dtype));
  const at::Tensor& into = transfer.into;
  if (into.is_cpu() && into.is_contiguous() && into.scalar_type() == transfer.dtype) {
    file.read_at(into.mutable_data_ptr(), transfer.count * width, transfer.offset);
    return;
  }
  const int64_t chunk = std::min(transfer.count, kBlockBytes / width);
  const at::Tensor staged = at::empty({chunk}, at::TensorOptions().dtype(transfer.dtype).device(at::kCPU));
  for (int64_t begin = 0; begin < transfer.count; begin += chunk) {
    const int64_t count = std::min(chunk, transfer.count - begin);
    file.read_at(staged.mutable_data_ptr(), count * width, transfer.offset + begin * width);
    into.narrow(0, begin, count).copy_(staged.narrow(0, 0, count));
  }
}

}  // namespace

Reader::Reader(const std::string& directory, const std::string& tag) {
  auto contents = std::make_shared<Contents>();
  contents->folder = existing_folder(directory, tag);
  const std::string path = contents->folder + "/" + kManifestName;
  contents->table = decode_manifest(read_text(path), path);
  check_shards(contents->folder, contents->table.tensors);
  contents_ = std::move(contents);
}

const Manifest& Reader::manifest() const { return contents_->table.manifest; }

std::string Reader::rank_state_json(int rank) const {
  const std::vector<std::string>& states = contents_->table.rank_states;
  return rank >= 0 && rank < static_cast<int>(states.size()) ? states[rank] : "";
}

std::vector<std::string> Reader::check(const std::vector<Piece>& wanted, bool strict) const {
  const Table& table = contents_->table.tensors;
  std::vector<std::string> lines;
  std::set<std::string> seen;  // several pieces of one tensor can have one fault
  std::set<std::string> names;
  for (const Piece& piece : wanted) {
    names.insert(tensor_key(piece.name, piece.role));
    const auto line = mismatch(table, piece);
    if (line && seen.insert(*line).second) lines.push_back(*line);
  }
  for (const auto& [key, logical] : table) {
    if (strict && names.count(key) == 0) {
      lines.push_back("unexpected in the checkpoint: '" + key + "' of shape " + shape_text(logical.shape));
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
  for (const Transfer& transfer : plan_transfers(contents_->table.tensors, wanted)) {
    const std::string path = contents_->folder + "/" + transfer.file;
    if (!file || file->path() != path) file.emplace(File::open(path));
    run_transfer(*file, transfer);
  }
}

std::vector<Piece> Reader::table() const {
  std::vector<Piece> pieces;
  for (const auto& [key, logical] : contents_->table.tensors) {
    pieces.push_back({logical.name, logical.role, logical.shape, 0, numel_of(logical.shape, key), at::Tensor()});
  }
  return pieces;
}

}  // namespace deeptide::checkpoint
