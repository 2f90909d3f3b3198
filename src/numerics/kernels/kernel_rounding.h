// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packed numbers and stochastic rounding in kernels: the bits of the vector code, one number at a time.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_numbers.h"

namespace deeptide::numerics::kernel {

constexpr uint32_t kHalfway = 0x8000;  // the low half of a number between two of bf16

/// The number of these halves. `above`: it lies above `high`, if it is halfway.
DEEPTIDE_HOST_DEVICE float unpacked(uint32_t high, uint32_t low, bool above) {
  const uint32_t distance = low < kHalfway ? low : low - 0x10000u;
  return float_of((high << 16) + distance + (low == kHalfway && above ? 0x10000u : 0u));
}

/// Returns the bits that packing keeps beside the number in bf16: none of a NaN.
DEEPTIDE_HOST_DEVICE uint32_t low_half(float x) { return x != x ? 0 : bits_of(x) & 0xFFFFu; }

/// Whether a number that is halfway lies above what it rounds to: halves round to even.
DEEPTIDE_HOST_DEVICE bool is_above(float x) { return (bits_of(x) & 0x10000u) == 0; }

/// 32 bits of element `i`: 16 for each of the streams 2 * pair and 2 * pair + 1.
DEEPTIDE_HOST_DEVICE uint32_t random_of(const RandomBits& key, int pair, int64_t i) {
  const auto index = static_cast<uint64_t>(key.index + i);
  const auto low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(index >> 32);
  uint32_t x = low + key.first[pair] + high * 0x9E3779B9u;
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x ^= key.second[pair] + high * 0x85EBCA6Bu;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

/// In bf16, up or down as `stream` has it for element `i`.
DEEPTIDE_HOST_DEVICE uint16_t rounded_by(float x, const RandomBits& key, int stream, int64_t i) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  if (magnitude >= 0x7F800000u)
    return static_cast<uint16_t>(sign >> 16 | (magnitude > 0x7F800000u ? 0x7FC0u : 0x7F80u));
  const uint32_t both = random_of(key, stream / 2, i),
                 moved = magnitude + (stream % 2 == 0 ? both & 0xFFFFu : both >> 16);
  return static_cast<uint16_t>((sign | (moved < 0x7F800000u ? moved : 0x7F7FFFFFu)) >> 16);
}

}  // namespace deeptide::numerics::kernel
