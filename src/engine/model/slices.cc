// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts a range of a slice into the part of a row, whole rows, and the part of another that it is.
#include "engine/model/slices.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "sharding/tensor_slices.h"

namespace deeptide::engine {

using at::Tensor;
using checkpoint::Piece;
using checkpoint::PieceData;
using checkpoint::Region;
using sharding::SliceRows;
using Band = SliceRows::Band;

namespace {

int64_t product(at::IntArrayRef factors) {
  return std::accumulate(factors.begin(), factors.end(), int64_t{1}, std::multiplies<>());
}

/// Moves between `block` and elements [begin, ...) of the data.
void move(const PieceData& data, Extent extent, int64_t begin, const Tensor& block) {
  if (data.transfer()) return data.transfer()(begin, block);
  const Tensor part = data.tensor().view({-1}).narrow(0, begin, block.numel());
  extent == Extent::held ? part.copy_(block) : block.copy_(part);
}

/// The stripes of rows of `length`: from element `begin` on, the first `width` elements each.
PieceData striped(const PieceData& data, Extent extent, int64_t begin, int64_t length, int64_t width) {
  return {data.dtype(), [=](int64_t at, const Tensor& block) {
            for (int64_t done = 0; done < block.numel();) {
              const int64_t row = (at + done) / width, column = (at + done) % width;
              const int64_t count = std::min(width - column, block.numel() - done);
              move(data, extent, begin + row * length + column, block.narrow(0, done, count));
              done += count;
            }
          }};
}

/// The pieces of one slice's piece.
class Placement {
 public:
  Placement(const Piece& piece, const TensorSlice& slice, SliceRows rows, Extent extent)
      : piece_(piece),
        slice_(slice),
        rows_(std::move(rows)),
        extent_(extent),
        shape_(sharding::whole_shape(slice, piece.shape)),
        first_(piece.region.offsets[0]),
        last_(first_ + piece.region.sizes[0]) {}

  std::vector<Piece> run() {
    const int64_t head = first_ / rows_.here, tail = last_ / rows_.here;
    if (head == tail) {
      add_part(head, first_ % rows_.here, last_ % rows_.here);
    } else {
      const bool begins_within = first_ % rows_.here != 0;
      if (begins_within) add_part(head, first_ % rows_.here, rows_.here);
      add_rows(head + (begins_within ? 1 : 0), tail);
      add_part(tail, 0, last_ % rows_.here);
    }
    if (pieces_.empty()) add(Region::range(0, 0), at::empty({0}, at::TensorOptions().dtype(piece_.data.dtype())));
    return std::move(pieces_);
  }

 private:
  void add(Region region, PieceData data) {
    Piece piece = piece_;
    piece.shape = shape_;
    piece.region = std::move(region);
    piece.data = std::move(data);
    pieces_.push_back(std::move(piece));
  }

  /// Elements [from, to) of a row.
  void add_part(int64_t row, int64_t from, int64_t to) {
    for (const Band& band : rows_.bands) {
      const int64_t begin = std::max(from, band.here), end = std::min(to, band.here + band.width);
      if (begin >= end) continue;
      const int64_t there = row * rows_.there + band.there + begin - band.here;
      add(Region::range(there, there + end - begin), piece_.data.part(row * rows_.here + begin - first_, end - begin));
    }
  }

  void add_rows(int64_t from, int64_t to) {
    if (from >= to) return;
    if (slice_.dim == 0) return add_part(0, 0, rows_.here);
    add_boxes({.offsets = std::vector<int64_t>(shape_.size(), 0), .sizes = shape_}, 0, from, to, from);
  }

  /// Rows [from, to) of those in `box`, which has one index of each dimension before `dim`. `row`: the first's number.
  void add_boxes(Region box, int64_t dim, int64_t from, int64_t to, int64_t row) {
    const auto d = static_cast<size_t>(dim);
    const int64_t each = product(at::IntArrayRef(shape_).slice(d + 1, static_cast<size_t>(slice_.dim - dim - 1)));
    const auto add_within = [&](int64_t index, int64_t begin, int64_t end, int64_t first) {
      Region part = box;
      part.offsets[d] = index;
      part.sizes[d] = 1;
      add_boxes(std::move(part), dim + 1, begin, end, first);
    };
    const int64_t head = from / each, tail = to / each, whole = (from + each - 1) / each;
    if (head == tail) return add_within(head, from % each, to % each, row);
    if (from % each != 0) add_within(head, from % each, each, row);
    if (to % each != 0) add_within(tail, 0, to % each, row + tail * each - from);
    if (whole == tail) return;
    box.offsets[d] = whole;
    box.sizes[d] = tail - whole;
    add_bands(box, row + whole * each - from, (tail - whole) * each);
  }

  void add_bands(const Region& rows, int64_t row, int64_t count) {
    const auto dim = static_cast<size_t>(slice_.dim);
    const int64_t inner = product(at::IntArrayRef(shape_).slice(dim + 1));
    for (const Band& band : rows_.bands) {
      if (band.width == 0) continue;
      Region box = rows;
      box.offsets[dim] = band.there / inner;
      box.sizes[dim] = band.width / inner;
      const int64_t begin = row * rows_.here + band.here - first_;
      const bool is_dense = band.width == rows_.here;
      add(std::move(box), is_dense ? piece_.data.part(begin, count * rows_.here)
                                   : striped(piece_.data, extent_, begin, rows_.here, band.width));
    }
  }

  const Piece& piece_;
  const TensorSlice& slice_;
  const SliceRows rows_;
  const Extent extent_;
  const checkpoint::Shape shape_;
  const int64_t first_, last_;
  std::vector<Piece> pieces_;
};

}  // namespace

void place_slices(const Topology& topology, Extent extent, std::vector<Piece>& pieces) {
  if (topology.slices.empty()) return;
  const comm::Team team = topology.team({world::Axis::tensor});
  std::vector<Piece> placed;
  for (Piece& piece : pieces) {
    const auto found = topology.slices.find(piece.name);
    if (found == topology.slices.end()) {
      placed.push_back(std::move(piece));
      continue;
    }
    const TensorSlice& slice = found->second;
    SliceRows rows = sharding::rows_of(slice, piece.shape, team.index(), team.size());
    for (Piece& part : Placement(piece, slice, std::move(rows), extent).run()) placed.push_back(std::move(part));
  }
  pieces = std::move(placed);
}

std::vector<Piece> whole_pieces(const Topology& topology, const BoundModel& model,
                                const zero::ShardedOptimizer* optimizer, bool moments, Extent extent) {
  std::vector<Piece> pieces = live_pieces(model, optimizer, moments, extent);
  place_slices(topology, extent, pieces);
  return pieces;
}

}  // namespace deeptide::engine
