// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads and stores of numbers in kernels. In integers where formats differ, so that every compiler gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "numerics/kernels/kernel_arguments.h"
#include "numerics/kernels/kernel_launch.h"

namespace deeptide::numerics::kernel {

DEEPTIDE_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DEEPTIDE_HOST_DEVICE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

/// Rounds to nearest even. A NaN becomes the quiet NaN: rounding could carry its bits into Inf.
DEEPTIDE_HOST_DEVICE uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + ((bits >> 16 & 1u) + 0x7FFFu)) >> 16);
}

DEEPTIDE_HOST_DEVICE float from_fp16(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3FFu;
  if (exponent == 31) return float_of(sign | 0x7F800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0u));
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

/// Rounds to nearest even, to infinity from 65520 on.
DEEPTIDE_HOST_DEVICE uint16_t to_fp16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  // Below 2^-14 the last place is 2^-24, as that of numbers from 0.5 on: the sum rounds as it should.
  if (size < 0x38800000u) return static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - 0x3F000000u));
  return static_cast<uint16_t>(sign | (size + (size >> 13 & 1u) + 0xFFFu - (112u << 23)) >> 13);
}

/// Element `i` as it lies in memory. Apart from `value_of`, so that all of an element's loads are under way before the
/// first of them is used.
DEEPTIDE_HOST_DEVICE uint32_t load_bits(const void* data, NumberType type, int64_t i) {
  return type == NumberType::fp32 ? static_cast<const uint32_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
}

DEEPTIDE_HOST_DEVICE float value_of(uint32_t bits, NumberType type) {
  if (type == NumberType::fp32) return float_of(bits);
  return type == NumberType::bf16 ? float_of(bits << 16) : from_fp16(bits);
}

DEEPTIDE_HOST_DEVICE float load(const Numbers& from, int64_t i) {
  return value_of(load_bits(from.data, from.type, i), from.type);
}

DEEPTIDE_HOST_DEVICE void store_bits(uint32_t bits, const Numbers& to, int64_t i) {
  if (to.type == NumberType::fp32) {
    static_cast<uint32_t*>(to.data)[i] = bits;
  } else {
    static_cast<uint16_t*>(to.data)[i] = static_cast<uint16_t>(bits);
  }
}

/// Rounds once; returns what the memory holds then.
DEEPTIDE_HOST_DEVICE float store(float x, const Numbers& to, int64_t i) {
  const uint32_t bits = to.type == NumberType::fp32   ? bits_of(x)
                        : to.type == NumberType::bf16 ? to_bf16(x)
                                                      : to_fp16(x);
  store_bits(bits, to, i);
  return value_of(bits, to.type);
}

/// Adds `count` rows by pairs: `load(row, values)` gives kWidth values of one; `sums` gets the sum.
template <int kWidth, typename Load>
DEEPTIDE_HOST_DEVICE void add_by_pairs(int count, const Load& load, float* sums) {
  float partial[Rows::kLevels][kWidth];  // by level: the sum of 2^level rows whose neighbours are still to come
  for (int row = 0; row < count; ++row) {
    const bool last = row + 1 == count;
    load(row, sums);
    int level = 0;
    for (; row >> level != 0 && (last || (row >> level & 1) != 0); ++level) {
      for (int k = 0; (row >> level & 1) != 0 && k < kWidth; ++k) sums[k] = partial[level][k] + sums[k];
    }
    for (int k = 0; !last && k < kWidth; ++k) partial[level][k] = sums[k];
  }
}

/// scale * the rows' sum at element `i`.
DEEPTIDE_HOST_DEVICE float sum_of(const Rows& rows, int64_t i) {
  const auto load = [&](int row, float* value) {
    *value = value_of(load_bits(rows.data[row], rows.type, i), rows.type);
  };
  float total = 0.0f;
  add_by_pairs<1>(rows.count, load, &total);
  return total * rows.scale;
}

}  // namespace deeptide::numerics::kernel
