// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradients in pieces for tests of kernels, as parameters of a unit have them.
#pragma once

#include <ATen/ops/randn.h>

#include <cstdint>
#include <vector>

#include "numerics/sums/ordered_sum.h"

namespace deeptide {

/// Pieces of these lengths, each at the next multiple of 32 elements; `before` elements of zeros come first.
inline numerics::Contributions random_pieces(const std::vector<int64_t>& lengths, at::ScalarType dtype, double scale,
                                             c10::DeviceType device, int64_t before = 0) {
  constexpr int64_t kAligned = 32;
  std::vector<numerics::Piece> pieces;
  int64_t end = before;
  for (const int64_t length : lengths) {
    pieces.push_back({end, at::randn({length}).to(dtype).to(device)});
    end += (length + kAligned - 1) / kAligned * kAligned;
  }
  return {std::move(pieces), end, scale};
}

}  // namespace deeptide
