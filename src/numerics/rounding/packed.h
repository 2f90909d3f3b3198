// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An fp32 number as its nearest bf16 and 16 bits more: a master that shares its upper half with the parameter.
//
// Rounded to nearest even, the bf16 number H is at most 2^15 of the fp32 number's last places away, so H's bits plus
// the number's own low 16 bits, taken with a sign, give it back: also at infinities (the largest finite numbers round
// to them), at denormals and at zeros. Only 2^15 itself says nothing about its sign: an even H has 65537 numbers that
// round to it, one more than 16 bits tell apart. HalfwayBits keeps that bit for the elements that need it. A NaN comes
// back as the quiet NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace deeptide::numerics {

/// Which elements lie exactly halfway between two bf16 numbers and above the one that they round to. Random numbers do
/// once in 131072. Thread-safe on a CPU; at most an eighth of a byte per element.
class HalfwayBits {
 public:
  /// In the host's memory, as far as there are any.
  explicit HalfwayBits(int64_t numel);
  /// One bit per element in `bits` (numel / 8 rounded up, uint8), zeros: where host memory is out of a kernel's reach.
  explicit HalfwayBits(at::Tensor bits);

  bool is_above(int64_t element) const;
  void set(int64_t element, bool above);

  bool is_tensor() const { return bits_.defined(); }
  /// That tensor; undefined: they are in the host's memory.
  const at::Tensor& bits() const { return bits_; }
  /// The bits of `count` elements from `first` on: (count,) of 0 and 1, uint8. Only of bits in a tensor, as `set_all`.
  at::Tensor above(int64_t first, int64_t count) const;
  void set_all(int64_t first, const at::Tensor& above);

 private:
  static constexpr int64_t kChunk = 4096;  // elements
  using Chunk = std::array<uint64_t, kChunk / 64>;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Chunk>> chunks_;  // null: no element of it
  at::Tensor bits_;
};

/// Memory of packed numbers. `first`: the first one's index in `halfway`.
struct PackedRange {
  uint16_t* high = nullptr;  // bf16
  uint16_t* low = nullptr;
  HalfwayBits* halfway = nullptr;
  int64_t first = 0;

  PackedRange from(int64_t begin) const { return {high + begin, low + begin, halfway, first + begin}; }
};

/// to[i] = the number, exactly. On the calling thread.
void unpack(const PackedRange& from, int64_t count, float* to);
/// Rounds to `to.high` as round_to does, and keeps the rest.
void pack(const float* from, int64_t count, const PackedRange& to);

/// Packed numbers as tensors (N,) on any device. The halves may lie on different ones.
struct PackedTensors {
  at::Tensor high;  // bf16
  at::Tensor low;   // int16
  HalfwayBits* halfway = nullptr;
  int64_t first = 0;
};

/// The same into or from `to` and `from` (N,), fp32, where `high` lies: in ATen operators, with equal bits, if the bits
/// of what lies halfway are a tensor.
void unpack(const PackedTensors& from, const at::Tensor& to);
void pack(const at::Tensor& from, const PackedTensors& to);

namespace detail {

/// Adds to bits[i], where low[i] is -2^15, what HalfwayBits knows of `count` elements from `first` on.
void raise_halfway(const PackedRange& range, size_t first, size_t count, const int32_t* low, int32_t* bits);
/// Notes for each of these fp32 numbers that is halfway on which side it lies.
void note_halfway(const PackedRange& range, size_t first, size_t count, const uint32_t* bits);

}  // namespace detail
}  // namespace deeptide::numerics
