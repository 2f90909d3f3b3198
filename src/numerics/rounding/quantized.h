// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Blocks of fp32 numbers as whole numbers of 8 or 4 bits and one scale each: gradients that travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace deeptide::numerics {

/// Elements with one scale. A range's last block may be short; its message is not.
inline constexpr int64_t kQuantizedBlock = 128;

/// Whole numbers go from -most to most; -most - 1 stands for a number that is not finite.
constexpr int64_t most_quantized(int bits) { return (int64_t{1} << (bits - 1)) - 1; }
/// Bytes of `numel` elements: the scales in fp32, then the numbers.
constexpr int64_t quantized_bytes(int64_t numel, int bits) {
  const int64_t blocks = (numel + kQuantizedBlock - 1) / kQuantizedBlock;
  return blocks * (static_cast<int64_t>(sizeof(float)) + kQuantizedBlock * bits / 8);
}

/// The loss of finite elements by rounding.
struct QuantizationLoss {
  double squares = 0.0;     // of what was lost
  double of_squares = 0.0;  // of the elements
  float largest = 0.0F;     // loss of an element, over the largest magnitude of its block

  void add(const QuantizationLoss& other) {
    squares += other.squares;
    of_squares += other.of_squares;
    largest = std::max(largest, other.largest);
  }
};

/// An element loses at most this share of its block's largest magnitude, but for fp32's own rounding.
constexpr double largest_loss(int bits) { return 0.5 / static_cast<double>(most_quantized(bits)); }

/// Rounds to the nearest multiple of the block's scale, its largest finite magnitude / most, halves to even. Blocks
/// whose scale would be below the smallest normal number count as zeros. The bytes depend on the values alone.
/// Shapes: values (N,) fp32, message (quantized_bytes(N, bits),) uint8; contiguous, on the CPU. N may be 0.
/// Errors: ValueError on tensors that do not fit, and on other bits than 4 and 8.
QuantizationLoss quantize(const at::Tensor& values, int bits, const at::Tensor& message);
/// Elements that were not finite become NaN.
void dequantize(const at::Tensor& message, int bits, const at::Tensor& values);

}  // namespace deeptide::numerics
