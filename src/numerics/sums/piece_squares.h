// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A sum of squares of elements that come piece by piece: the same bits however they are cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace deeptide::numerics {

/// Adds the squares of a range of `numel` elements in fp64. Each element belongs to a lane of its block, and a block's
/// pieces come in ascending order, so the order of additions does not depend on the cuts. Pieces of different blocks
/// may be added by different threads.
class PieceSquares {
 public:
  static constexpr int64_t kBlock = 1 << 15;  // elements

  explicit PieceSquares(int64_t numel);

  /// Elements [begin, begin + count), which lie within one block. On the CPU.
  void add(int64_t begin, const float* values, int64_t count);
  /// The same for a tensor (count,) fp32, of any blocks and on any device. Elsewhere than on a CPU the device's own
  /// sum is taken, and depends on the cuts; `total` waits for it.
  void add(int64_t begin, const at::Tensor& values);
  double total() const;

 private:
  static constexpr int64_t kLanes = 16;

  std::vector<std::array<double, kLanes>> blocks_;
  std::vector<at::Tensor> on_device_;  // sums () fp64
};

}  // namespace deeptide::numerics
