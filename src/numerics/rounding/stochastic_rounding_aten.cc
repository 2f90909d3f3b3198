// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding in ATen operators, for devices whose memory the vector code cannot reach.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <optional>

#include "numerics/rounding/stochastic_rounding.h"

namespace deeptide::numerics {

using at::Tensor;

namespace {

// Numbers of 32 bits are computed in 64: not every device has operators for unsigned ones.
constexpr int64_t kLow32 = 0xFFFFFFFF;
constexpr int64_t kRounded = 1 << 20;  // elements at a time

/// The lower 32 bits of the product, by halves of the factor: no number has more than 63 bits.
Tensor times(const Tensor& x, int64_t factor) {
  const Tensor upper = x.mul(factor >> 16).bitwise_and_(0xFFFF).mul_(0x10000);
  return x.mul(factor & 0xFFFF).add_(upper).bitwise_and_(kLow32);
}

/// x ^ (x >> count)
Tensor folded(const Tensor& x, int64_t count) { return x.bitwise_xor(x.bitwise_right_shift(count)); }

/// Draws the vector code's `random_bits` for `count` elements.
Tensor random_bits(const RandomKey& key, int pair, int64_t index, int64_t count, const at::TensorOptions& options) {
  const Tensor element = at::arange(index, index + count, options.dtype(at::kLong));
  const Tensor place = element.bitwise_and(kLow32), high = element.bitwise_right_shift(32);
  const Tensor first = times(high, 0x9E3779B9).add_(static_cast<int64_t>(key.first[pair])).add_(place);
  const Tensor second = times(high, 0x85EBCA6B).add_(static_cast<int64_t>(key.second[pair])).bitwise_and_(kLow32);
  const Tensor x = times(folded(first.bitwise_and(kLow32), 16), 0x7FEB352D).bitwise_xor_(second);
  return folded(times(folded(x, 15), 0x846CA68B), 16);
}

Tensor bits_of_stream(const Tensor& random, int stream) {
  return stream % 2 == 0 ? random.bitwise_and(0xFFFF) : random.bitwise_right_shift(16);
}

/// Rounds as the vector code's `rounded_by`: the bf16 number's bits are the upper 16 of the result's lower 32.
Tensor rounded_by(const Tensor& x, const Tensor& random) {
  constexpr int64_t kInfinity = 0x7F800000, kMost = 0x7F7FFFFF, kNaN = 0x7FC00000, kSign = 0x80000000;
  const Tensor bits = x.view(at::kInt).to(at::kLong).bitwise_and_(kLow32);
  const Tensor sign = bits.bitwise_and(kSign), magnitude = bits.bitwise_xor(sign);
  const Tensor finite = magnitude.add(random).clamp_max_(kMost);
  const Tensor other = magnitude.masked_fill(magnitude.gt(kInfinity), kNaN);
  return at::where(magnitude.lt(kInfinity), finite, other).bitwise_or_(sign);
}

}  // namespace

void round_stochastically(const Tensor& from, const Tensor& to, const RandomKey& key, int stream, int64_t index) {
  for (int64_t begin = 0; begin < from.numel(); begin += kRounded) {
    const int64_t count = std::min(kRounded, from.numel() - begin);
    const Tensor random = random_bits(key, stream / 2, index + begin, count, from.options());
    const Tensor bits = rounded_by(from.narrow(0, begin, count), bits_of_stream(random, stream));
    to.narrow(0, begin, count).view(at::kShort).copy_(bits.view(at::kShort).slice(0, 1, std::nullopt, 4));
  }
}

}  // namespace deeptide::numerics
