// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads: any region of any logical tensor, from whichever shards hold it.
#include "checkpoint/load/reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/load/extent_reader.h"
#include "checkpoint/load/transfer.h"
#include "checkpoint/save/block_writer.h"

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

/// Whether ranks of one host want the same bytes: each rank as much as makes all of them more than there is.
bool want_the_same(const Table& table, const std::vector<Piece>& wanted, int readers) {
  double own = 0.0, all = 0.0;
  std::set<TensorId> seen;
  for (const Piece& piece : wanted) {
    const auto& [id, saved] = *table.find({piece.name, piece.role});
    const auto width = static_cast<double>(element_bytes(saved.dtype));
    own += width * static_cast<double>(piece.region.numel());
    if (seen.insert(id).second) all += width * static_cast<double>(numel_of(saved.shape, saved.key));
  }
  constexpr double kUneven = 1.5;  // ranks' shares are not all equal
  return readers * own > kUneven * all;
}

/// Cuts a region into parts of at most `most` elements, each of which lies in one run of the region's order.
void cut(const Region& region, int64_t most, const std::function<void(const Region&)>& visit) {
  const int64_t numel = region.numel();
  if (numel == 0) return;
  if (numel <= most) return visit(region);
  size_t dim = 0;
  while (region.sizes[dim] == 1) ++dim;
  const int64_t rows = std::max<int64_t>(1, most / (numel / region.sizes[dim]));
  Region part = region;
  for (int64_t begin = 0; begin < region.sizes[dim]; begin += rows) {
    part.offsets[dim] = region.offsets[dim] + begin;
    part.sizes[dim] = std::min(rows, region.sizes[dim] - begin);
    cut(part, most, visit);
  }
}

/// The position of `part`, which is of cut(), in the order of `whole`.
int64_t position_in(const Region& whole, const Region& part) {
  int64_t position = 0;
  for (size_t d = 0; d < whole.sizes.size(); ++d) {
    position = position * whole.sizes[d] + part.offsets[d] - whole.offsets[d];
  }
  return position;
}

void note_elsewhere(const Share& share, size_t piece, std::vector<PartElsewhere>& elsewhere) {
  const Logical& saved = *share.saved;
  const int64_t most = std::max<int64_t>(1, kBlockBytes / element_bytes(saved.dtype));
  cut(share.wanted->region, most, [&](const Region& region) {
    if (first_shared(saved.shape, share.extent->region, region) < 0) return;
    elsewhere.push_back({piece, saved.id, share.extent->file, share.extent - saved.extents.data(), region});
  });
}

/// Lays elements side by side as they are read.
class Packed final : public ElementSink {
 public:
  explicit Packed(at::Tensor& into) : next_(static_cast<char*>(into.mutable_data_ptr())), width_(into.element_size()) {}
  char* memory(int64_t) override { return nullptr; }
  void put(int64_t, const char* elements, int64_t count) override {
    next_ = std::copy_n(elements, count * width_, next_);
  }

 private:
  char* next_;
  int64_t width_;
};

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

void Reader::require_fit(const std::vector<Piece>& wanted) const {
  const std::vector<std::string> lines = check(wanted, false);
  if (lines.empty()) return;
  std::string text = "the checkpoint " + contents_->folder + " does not fit what is to be loaded:";
  for (size_t i = 0; i < std::min(lines.size(), kMaxListedLines); ++i) text += "\n  " + lines[i];
  if (lines.size() > kMaxListedLines) text += "\n  and " + std::to_string(lines.size() - kMaxListedLines) + " more";
  throw CheckpointError(text);
}

void Reader::read(const std::vector<Piece>& wanted, int readers) const {
  const auto elsewhere = read_here(wanted, readers);
  if (elsewhere.empty()) return;
  throw CheckpointError("the checkpoint " + contents_->folder + " lacks " + elsewhere.front().file + ", which has '" +
                        tensor_key(elsewhere.front().id) + "'");
}

void Reader::read(const std::vector<Piece>& wanted, StreamedReads& files) const {
  require_fit(wanted);
  const at::NoGradGuard no_grad;
  for (const Share& share : plan_shares(contents_->table.tensors, wanted)) {
    transfer(files, *share.saved, *share.extent, *share.wanted);
  }
}

std::vector<PartElsewhere> Reader::read_here(const std::vector<Piece>& wanted, int readers) const {
  require_fit(wanted);
  const at::NoGradGuard no_grad;
  const Table& table = contents_->table.tensors;
  using Through = StreamedReads::Through;
  StreamedReads files(contents_->folder, want_the_same(table, wanted, readers) ? Through::page_cache : Through::drive);
  std::vector<PartElsewhere> elsewhere;
  std::vector<Share> shares = plan_shares(table, wanted);
  std::erase_if(shares, [&](const Share& share) {
    if (!contents_->of_one_host || exists(files.path(share.extent->file))) return false;
    note_elsewhere(share, static_cast<size_t>(share.wanted - wanted.data()), elsewhere);
    return true;
  });
  for (const Share& share : shares) announce_shared(files, *share.saved, *share.extent, share.wanted->region);
  for (const Share& share : shares) transfer(files, *share.saved, *share.extent, *share.wanted);
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
  const Logical& saved = contents_->table.tensors.at(part.id);
  at::Tensor elements = at::empty({numel(part)}, at::TensorOptions().dtype(saved.dtype));
  Packed packed(elements);
  const Extent& extent = saved.extents.at(static_cast<size_t>(part.extent));
  StreamedReads files(contents_->folder);
  announce_shared(files, saved, extent, part.region);
  read_shared(files, saved, extent, part.region, packed);
  return elements;
}

int64_t Reader::numel(const PartElsewhere& part) const {
  const Logical& saved = contents_->table.tensors.at(part.id);
  return num_shared(saved.shape, saved.extents.at(static_cast<size_t>(part.extent)).region, part.region);
}

void Reader::fill(const Piece& wanted, const PartElsewhere& part, const at::Tensor& block) const {
  const at::NoGradGuard no_grad;
  const Logical& saved = contents_->table.tensors.at(part.id);
  const int64_t begin = position_in(wanted.region, part.region);
  int64_t done = 0;
  for_each_shared_run(saved.shape, saved.extents.at(static_cast<size_t>(part.extent)).region, part.region,
                      [&](const SharedRun& run) {
                        checkpoint::fill(wanted, begin + run.b, block.narrow(0, done, run.count));
                        done += run.count;
                      });
}

void Reader::verify(const std::vector<Piece>& wanted, int part, int parts) const {
  std::set<TensorId> named;
  for (const Piece& piece : wanted) named.insert({piece.name, piece.role});
  StreamedReads files(contents_->folder,
                      StreamedReads::Through::page_cache);  // they are read again, by whoever wants them
  std::vector<std::function<void()>> checks;
  int64_t before = 0;  // blocks that are dealt out
  for (const auto& [id, saved] : contents_->table.tensors) {
    if (!named.contains(id)) continue;
    for (const Extent& extent : saved.extents) {
      const int64_t blocks = num_hashed_blocks(extent);
      const bool is_own = id.role.is_of_one_rank();
      const int64_t stride = is_own ? 1 : parts;
      const int64_t first = is_own ? 0 : (part + parts - before % parts) % parts;
      if (first < blocks && !(contents_->of_one_host && !exists(files.path(extent.file)))) {
        announce_blocks(files, saved, extent, first, stride);
        checks.emplace_back([&, first, stride] { verify_blocks(files, saved, extent, first, stride); });
      }
      if (!is_own) before += blocks;
    }
  }
  for (const auto& check : checks) check();
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

std::unique_ptr<StreamedReads> Reader::announce_all() const {
  auto files = std::make_unique<StreamedReads>(contents_->folder);
  for (const auto& [id, logical] : contents_->table.tensors) announce_whole(*files, logical);
  return files;
}

}  // namespace deeptide::checkpoint
