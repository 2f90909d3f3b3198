// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any region of any logical tensor, from whichever shards hold it.
#include "checkpoint/reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/block_writer.h"
#include "checkpoint/extent_reader.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/transfer.h"

namespace deeptide::checkpoint {

namespace {

constexpr size_t kMaxListedLines = 20;

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

/// The place and the order of elements: tensors that have a place in common are one under two names.
using Place = std::tuple<std::string, int64_t, Shape, Shape>;

std::set<Place> places_of(const Logical& logical) {
  std::set<Place> places;
  for (const Extent& extent : logical.extents) {
    places.insert({extent.file, extent.offset, extent.region.sizes, extent.strides});
  }
  return places;
}

/// The part of one wanted piece that one file holds.
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

/// Errors: CheckpointError for elements of a box: saves of this library have ranges.
void note_elsewhere(const Share& share, size_t piece, std::vector<PartElsewhere>& elsewhere) {
  const Region &saved = share.extent->region, &wanted = share.wanted->region;
  const TensorId id = {share.wanted->name, share.wanted->role};
  if (saved.sizes.size() != 1 || wanted.sizes.size() != 1) {
    throw CheckpointError("elements " + saved.text() + " of '" + tensor_key(id) + "' lie in " + share.extent->file +
                          ", which this host lacks, and are no range: bring the files of all hosts into one folder");
  }
  const auto shared = intersect(saved, wanted);
  const int64_t end = shared->offsets[0] + shared->sizes[0];
  const int64_t most = std::max<int64_t>(1, kBlockBytes / element_bytes(share.saved->dtype));
  for (int64_t begin = shared->offsets[0]; begin < end; begin += most) {
    elsewhere.push_back({piece, id, share.extent->file, begin, std::min(begin + most, end)});
  }
}

}  // namespace

Reader::Reader(const std::string& directory, const std::string& tag)
    : contents_(std::make_shared<Contents>(open_contents(existing_folder(directory, tag)))) {}

Reader::Reader(const std::string& folder, ManifestTable contents)
    : contents_(std::make_shared<const Contents>(Contents{folder, std::move(contents)})) {}

Reader Reader::of_host(const std::string& folder, ManifestTable contents) {
  Reader reader(folder, ManifestTable{});
  reader.contents_ = std::make_shared<const Contents>(contents_of_host(folder, std::move(contents)));
  return reader;
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
  if (!strict) return lines;
  std::set<Place> expected_places;
  for (const TensorId& id : expected) {
    if (const auto found = table.find(id); found != table.end()) expected_places.merge(places_of(found->second));
  }
  for (const auto& [id, logical] : table) {
    if (expected.contains(id)) continue;
    const std::set<Place> places = places_of(logical);
    const bool is_further_name =
        !places.empty() && std::includes(expected_places.begin(), expected_places.end(), places.begin(), places.end());
    if (!is_further_name) {
      lines.push_back("unexpected in the checkpoint: '" + tensor_key(id) + "' of shape " + shape_text(logical.shape));
    }
  }
  return lines;
}

void Reader::read(const std::vector<Piece>& wanted) const {
  const auto elsewhere = read_here(wanted);
  if (elsewhere.empty()) return;
  throw CheckpointError("the checkpoint " + contents_->folder + " lacks " + elsewhere.front().file + ", which has '" +
                        tensor_key(elsewhere.front().id) + "'");
}

std::vector<PartElsewhere> Reader::read_here(const std::vector<Piece>& wanted) const {
  const std::vector<std::string> lines = check(wanted, false);
  if (!lines.empty()) {
    std::string text = "the checkpoint " + contents_->folder + " does not fit what is to be loaded:";
    for (size_t i = 0; i < std::min(lines.size(), kMaxListedLines); ++i) text += "\n  " + lines[i];
    if (lines.size() > kMaxListedLines) text += "\n  and " + std::to_string(lines.size() - kMaxListedLines) + " more";
    throw CheckpointError(text);
  }
  const at::NoGradGuard no_grad;
  std::vector<PartElsewhere> elsewhere;
  std::optional<File> file;
  for (const Share& share : plan_shares(contents_->table.tensors, wanted)) {
    const std::string path = contents_->folder + "/" + share.extent->file;
    if (contents_->of_one_host && !exists(path)) {
      note_elsewhere(share, static_cast<size_t>(share.wanted - wanted.data()), elsewhere);
      continue;
    }
    if (!file || file->path() != path) file.emplace(File::open(path));
    transfer(*file, *share.saved, *share.extent, *share.wanted);
  }
  return elsewhere;
}

std::set<std::string> Reader::files_here() const {
  std::set<std::string> files;
  for (const auto& [file, hash] : contents_->table.header_hashes) {
    if (exists(contents_->folder + "/" + file)) files.insert(file);
  }
  return files;
}

at::Tensor Reader::read_part(const PartElsewhere& part) const {
  const at::NoGradGuard no_grad;
  const Logical& saved = contents_->table.tensors.at(part.id);
  const at::Tensor elements = at::empty({part.end - part.begin}, at::TensorOptions().dtype(saved.dtype));
  const Piece piece{part.id.name, part.id.role, saved.shape, Region::range(part.begin, part.end), elements};
  const File file = File::open(contents_->folder + "/" + part.file);
  for (const Extent& extent : saved.extents) {
    if (extent.file == part.file && first_shared(saved.shape, extent.region, piece.region) >= 0) {
      transfer(file, saved, extent, piece);
    }
  }
  return elements;
}

void Reader::verify(const std::vector<Piece>& wanted, int part, int parts) const {
  std::set<TensorId> named;
  for (const Piece& piece : wanted) named.insert({piece.name, piece.role});
  int64_t before = 0;  // blocks that are dealt out
  for (const auto& [id, saved] : contents_->table.tensors) {
    if (!named.contains(id)) continue;
    for (const Extent& extent : saved.extents) {
      const int64_t blocks = num_hashed_blocks(extent);
      const bool is_own = id.role.is_of_one_rank();
      const int64_t stride = is_own ? 1 : parts;
      const int64_t first = is_own ? 0 : (part + parts - before % parts) % parts;
      const std::string path = contents_->folder + "/" + extent.file;
      if (first < blocks && !(contents_->of_one_host && !exists(path))) {
        verify_blocks(File::open(path), saved, extent, first, stride);
      }
      if (!is_own) before += blocks;
    }
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

}  // namespace deeptide::checkpoint
