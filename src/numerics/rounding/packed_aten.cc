// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packed numbers in ATen operators, for devices whose memory the vector code cannot reach.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "numerics/rounding/packed.h"

namespace deeptide::numerics {

using at::Tensor;

namespace {

constexpr int64_t kWidened = 1 << 20;  // elements that are widened to 64 bits at a time

Tensor bit_numbers(const Tensor& like) { return at::arange(8, like.options().dtype(at::kByte)); }

/// (N,) bytes to (8 N,) numbers, 0 or 1, the lowest bit first.
Tensor spread(const Tensor& bytes) {
  return bytes.unsqueeze(1).bitwise_right_shift(bit_numbers(bytes)).bitwise_and_(1).view({-1});
}

/// The bits of 16-bit numbers, with their sign, in 64 bits.
Tensor signed_bits(const Tensor& halves) { return halves.view(at::kShort).to(at::kLong); }

/// The lower 32 of each number's bits, as fp32.
Tensor as_floats(const Tensor& bits) { return bits.view(at::kInt).slice(0, 0, std::nullopt, 2).view(at::kFloat); }

void unpack_chunk(const PackedTensors& from, const Tensor& to) {
  const Tensor low = from.low.to(from.high.device()).to(at::kLong);
  Tensor bits = signed_bits(from.high).mul_(0x10000).add_(low);
  // The bits stay on the device of the parameters, which a save may read into the host's memory.
  const Tensor above = from.halfway->above(from.first, to.numel()).to(from.high.device(), at::kLong).mul_(0x10000);
  bits.add_(above.mul_(low.eq(-0x8000)));
  to.copy_(as_floats(bits));
}

void pack_chunk(const Tensor& from, const PackedTensors& to) {
  to.high.copy_(from);
  const Tensor bits = from.view(at::kInt).masked_fill(at::isnan(from), 0);
  to.low.copy_(bits.view(at::kShort).slice(0, 0, std::nullopt, 2));
  // Halves round to even: an even upper half means that the number lies above what it rounds to.
  to.halfway->set_all(to.first, bits.bitwise_and(0x1FFFF).eq(0x8000));
}

/// Calls visit(packed, values) for parts of both.
template <typename Visit>
void each_chunk(const PackedTensors& packed, const Tensor& values, Visit visit) {
  for (int64_t begin = 0; begin < values.numel(); begin += kWidened) {
    const int64_t count = std::min(kWidened, values.numel() - begin);
    visit(PackedTensors{packed.high.narrow(0, begin, count), packed.low.narrow(0, begin, count), packed.halfway,
                        packed.first + begin},
          values.narrow(0, begin, count));
  }
}

PackedRange range_of(const PackedTensors& packed) {
  return {static_cast<uint16_t*>(packed.high.mutable_data_ptr()), static_cast<uint16_t*>(packed.low.mutable_data_ptr()),
          packed.halfway, packed.first};
}

}  // namespace

HalfwayBits::HalfwayBits(Tensor bits) : bits_(std::move(bits)) {}

Tensor HalfwayBits::above(int64_t first, int64_t count) const {
  const int64_t begin = first / 8, end = (first + count + 7) / 8;
  return spread(bits_.narrow(0, begin, end - begin)).narrow(0, first % 8, count);
}

void HalfwayBits::set_all(int64_t first, const Tensor& above) {
  const int64_t begin = first / 8, end = (first + above.numel() + 7) / 8;
  const Tensor bytes = bits_.narrow(0, begin, end - begin);
  const Tensor all = spread(bytes);  // with the neighbours that share a byte
  all.narrow(0, first % 8, above.numel()).copy_(above);
  bytes.copy_(all.view({-1, 8}).bitwise_left_shift(bit_numbers(bytes)).sum(1));
}

void unpack(const PackedTensors& from, const Tensor& to) {
  if (!from.halfway->is_tensor()) return unpack(range_of(from), to.numel(), to.mutable_data_ptr<float>());
  each_chunk(from, to, &unpack_chunk);
}

void pack(const Tensor& from, const PackedTensors& to) {
  if (!to.halfway->is_tensor()) return pack(from.const_data_ptr<float>(), from.numel(), range_of(to));
  each_chunk(to, from, [](const PackedTensors& part, const Tensor& values) { pack_chunk(values, part); });
}

}  // namespace deeptide::numerics
