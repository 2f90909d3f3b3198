// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Slices of parameters that ranks along the tensor axis share: their places in the whole ones, joining and cutting.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/team.h"
#include "deeptide/tensor_slice.h"

namespace deeptide::sharding {

/// A rank's slice as rows of the whole parameter: one for each index of the dimensions before the slice's.
struct SliceRows {
  /// One rank's part of one block, within a row. Units: elements.
  struct Band {
    int64_t here = 0;   // where it begins in the slice's row
    int64_t there = 0;  // and in the whole parameter's
    int64_t width = 0;  // without padding
  };

  int64_t here = 0, there = 0;  // lengths
  std::vector<Band> bands;
};

/// `local`: the slice's shape; `index`: the rank's, of `ranks`.
SliceRows rows_of(const TensorSlice& slice, at::IntArrayRef local, int index, int ranks);

/// How many elements a rank has before those that fill up the last slices along dimension 0 of one block.
int64_t numel_before_padding(const TensorSlice& slice, at::IntArrayRef local, const comm::Team& team);

/// The shape of the parameter of which `local` is a rank's slice.
std::vector<int64_t> whole_shape(const TensorSlice& slice, at::IntArrayRef local);

/// The whole parameter, from every rank's slice. Shapes: slices (ranks, *local).
at::Tensor joined(const TensorSlice& slice, const at::Tensor& slices);

/// The slice of rank `index` of `ranks`, in memory of its own, padded with zeros.
at::Tensor cut(const TensorSlice& slice, const at::Tensor& whole, int ranks, int index);

}  // namespace deeptide::sharding
