// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says which part of a parameter a rank has where ranks share layers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide {

/// A parameter of which each rank of a tensor team has a slice along one dimension. Each block is cut by itself, into
/// parts of ceil(block / ranks) elements; the last part is padded where that is too much.
struct TensorSlice {
  std::string name;
  int64_t dim = 0;
  /// Sizes along `dim` in the whole parameter: {768}, or {768, 768, 768} of fused queries, keys and values.
  std::vector<int64_t> blocks;
};

}  // namespace deeptide
