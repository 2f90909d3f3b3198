// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts in rows: one for each index of the dimensions before the slice's, so a slice along dimension 0 is one row.
#include "sharding/tensor_slices.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/invariant.h"

namespace deeptide::sharding {

using at::Tensor;

namespace {

int64_t product(at::IntArrayRef factors) {
  return std::accumulate(factors.begin(), factors.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

SliceRows rows_of(const TensorSlice& slice, at::IntArrayRef local, int index, int ranks) {
  const int64_t inner = product(local.slice(static_cast<size_t>(slice.dim) + 1));
  SliceRows rows;
  for (const int64_t block : slice.blocks) {
    const int64_t part = (block + ranks - 1) / ranks;
    const int64_t begin = std::min(block, index * part);
    rows.bands.push_back({rows.here * inner, (rows.there + begin) * inner, std::min(part, block - begin) * inner});
    rows.here += part;
    rows.there += block;
  }
  DEEPTIDE_INVARIANT(rows.here == local[static_cast<size_t>(slice.dim)], "the slice of '", slice.name, "' has ",
                     local[static_cast<size_t>(slice.dim)], " of ", rows.here, " elements");
  rows.here *= inner;
  rows.there *= inner;
  return rows;
}

int64_t numel_before_padding(const TensorSlice& slice, at::IntArrayRef local, const comm::Team& team) {
  const SliceRows rows = rows_of(slice, local, team.index(), team.size());
  const int64_t numel = product(local);
  return rows.here == numel && rows.bands.size() == 1 ? rows.bands[0].width : numel;
}

std::vector<int64_t> whole_shape(const TensorSlice& slice, at::IntArrayRef local) {
  std::vector<int64_t> shape = local.vec();
  shape[static_cast<size_t>(slice.dim)] = std::accumulate(slice.blocks.begin(), slice.blocks.end(), int64_t{0});
  return shape;
}

Tensor joined(const TensorSlice& slice, const Tensor& slices) {
  const auto ranks = static_cast<int>(slices.size(0));
  const at::IntArrayRef local = slices.sizes().slice(1);
  Tensor whole = at::empty(whole_shape(slice, local), slices.options());
  const int64_t inner = product(local.slice(static_cast<size_t>(slice.dim) + 1));
  for (int rank = 0; rank < ranks; ++rank) {
    for (const SliceRows::Band& band : rows_of(slice, local, rank, ranks).bands) {
      if (band.width == 0) continue;
      whole.narrow(slice.dim, band.there / inner, band.width / inner)
          .copy_(slices[rank].narrow(slice.dim, band.here / inner, band.width / inner));
    }
  }
  return whole;
}

Tensor cut(const TensorSlice& slice, const Tensor& whole, int ranks, int index) {
  std::vector<int64_t> local = whole.sizes().vec();
  int64_t& features = local[static_cast<size_t>(slice.dim)];
  features = 0;
  for (const int64_t block : slice.blocks) features += (block + ranks - 1) / ranks;
  Tensor part = at::zeros(local, whole.options());
  const int64_t inner = product(at::IntArrayRef(local).slice(static_cast<size_t>(slice.dim) + 1));
  for (const SliceRows::Band& band : rows_of(slice, local, index, ranks).bands) {
    if (band.width == 0) continue;
    part.narrow(slice.dim, band.here / inner, band.width / inner)
        .copy_(whole.narrow(slice.dim, band.there / inner, band.width / inner));
  }
  return part;
}

}  // namespace deeptide::sharding
