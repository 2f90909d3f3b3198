// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One thread fills the blocks of all files in turn; the writes of each file's ring are under way meanwhile.
#include "checkpoint/save/shard_file.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "checkpoint/format/checkpoint_paths.h"
#include "checkpoint/save/block_writer.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

int64_t width_of(const Piece& piece) { return static_cast<int64_t>(c10::elementSize(piece.data.dtype())); }

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

// Takes the first `numel` elements of a range off it.
Piece take_first(Piece& piece, int64_t numel) {
  const int64_t begin = piece.region.offsets[0], end = begin + piece.region.sizes[0];
  Piece first = piece;
  first.region = Region::range(begin, begin + numel);
  first.data = piece.data.part(0, numel);
  piece.region = Region::range(begin + numel, end);
  piece.data = piece.data.part(numel, end - begin - numel);
  return first;
}

int64_t size_of(const ShardFile& file) {
  int64_t bytes = std::ssize(file.header);
  for (const Piece* piece : file.pieces) bytes += piece->bytes();
  return bytes;
}

/// Writes one file, a block at a time.
class FileWriter {
 public:
  FileWriter(const ShardFile& file, int64_t buffer_bytes, Table& table)
      : file_(file), table_(table), writer_(file.path, size_of(file), buffer_bytes) {
    writer_.append(file.header.data(), std::ssize(file.header));
    writer_.take_hashes();  // the header has one of its own, whatever its size
    offset_ = writer_.written_bytes();
  }

  /// Appends at most `most_bytes` of one piece. False: there is none left.
  bool append(int64_t most_bytes) {
    if (next_ == file_.pieces.size()) return false;
    const Piece& piece = *file_.pieces[next_];
    const int64_t numel = piece.region.numel(), count = std::min(numel - done_, most_bytes / width_of(piece));
    writer_.append(count == numel ? piece.data : piece.data.part(done_, count), count);
    done_ += count;
    if (done_ < numel) return true;
    for (Extent& extent : table_.at({piece.name, piece.role}).extents) {
      if (extent.file == file_.name && extent.offset == offset_) extent.hashes = writer_.take_hashes();
    }
    offset_ += piece.bytes();
    done_ = 0;
    ++next_;
    return true;
  }

  int64_t finish() {
    writer_.finish();
    return writer_.written_bytes();
  }

 private:
  const ShardFile& file_;
  Table& table_;
  BlockWriter writer_;
  size_t next_ = 0;     // piece
  int64_t done_ = 0;    // of its elements
  int64_t offset_ = 0;  // of the piece in the file
};

}  // namespace

void deal_out(std::vector<Piece>& pieces, int parts) {
  const auto counts = [](const Piece& piece) { return !piece.apart && piece.region.numel() > 0; };
  int64_t total = 0;
  for (const Piece& piece : pieces) total += counts(piece) ? piece.bytes() : 0;
  const int64_t share = std::max<int64_t>(1, (total + parts - 1) / parts);
  std::vector<Piece> dealt;
  int64_t before = 0;  // bytes that have a part
  const auto deal = [&](Piece piece) {
    piece.part = static_cast<int>(std::min<int64_t>(parts - 1, before / share));
    before += counts(piece) ? piece.bytes() : 0;
    dealt.push_back(std::move(piece));
  };
  for (Piece& piece : pieces) {
    while (counts(piece) && piece.region.sizes.size() == 1 && before / share < parts - 1) {
      const int64_t room = share - before % share;
      const int64_t first = (room + kBlockBytes - 1) / kBlockBytes * kBlockBytes / width_of(piece);
      if (first >= piece.region.numel()) break;
      deal(take_first(piece, first));
    }
    deal(std::move(piece));
  }
  pieces = std::move(dealt);
}

ShardLayout lay_out(const std::vector<Piece>& pieces, int rank, int parts,
                    const std::map<std::string, std::string>& metadata) {
  ShardLayout layout;
  for (const Piece& piece : pieces) {
    declare(layout.table, {piece.name, piece.role}, piece.shape, piece.data.dtype());
  }
  std::vector<Entries> entries(static_cast<size_t>(parts));
  for (int part = 0; part < parts; ++part) layout.files.push_back({shard_name(rank, part), {}, {}, {}});
  const auto order = in_file_order(pieces);
  std::map<TensorId, int> counts;
  for (const Piece* piece : order) ++counts[{piece->name, piece->role}];
  std::vector<int64_t> ends(static_cast<size_t>(parts));
  for (const Piece* piece : order) {
    const auto part = static_cast<size_t>(piece->part);
    const TensorId id = {piece->name, piece->role};
    const int64_t begin = std::exchange(ends.at(part), ends.at(part) + piece->bytes());
    const std::string key = tensor_key(id);
    entries[part][counts[id] > 1 ? region_key(key, piece->region) : key] = {piece->data.dtype(), piece->region.sizes,
                                                                            begin, ends[part]};
    layout.table.at(id).extents.push_back({piece->region, layout.files[part].name, begin});
    layout.files[part].pieces.push_back(piece);
  }
  check_extents(layout.table, "cannot save");
  std::map<std::string, int64_t> header_bytes;
  for (size_t part = 0; part < entries.size(); ++part) {
    ShardFile& file = layout.files[part];
    file.header = encode_header(entries[part], metadata);
    header_bytes[file.name] = std::ssize(file.header);
  }
  for (auto& [id, logical] : layout.table) {
    for (Extent& extent : logical.extents) extent.offset += header_bytes.at(extent.file);
  }
  return layout;
}

int64_t write_files(ShardLayout& layout, int64_t buffer_bytes) {
  const auto parts = std::ssize(layout.files);
  std::vector<std::unique_ptr<FileWriter>> writers;
  for (const ShardFile& file : layout.files) {
    writers.push_back(std::make_unique<FileWriter>(file, buffer_bytes / parts, layout.table));
  }
  // One file takes its pieces as they come: their functions read as much as fits into a block.
  constexpr int64_t kWholePiece = std::numeric_limits<int64_t>::max();
  for (bool more = true; more;) {
    more = false;
    for (const auto& writer : writers) more = writer->append(parts == 1 ? kWholePiece : kBlockBytes) || more;
  }
  int64_t bytes = 0;
  for (const auto& writer : writers) bytes += writer->finish();
  return bytes;
}

}  // namespace deeptide::checkpoint
