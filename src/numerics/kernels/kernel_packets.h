// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eight numbers at a time, in accesses of 16 bytes: with fewer bytes a thread a GPU's memory is not busy.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_numbers.h"

namespace deeptide::numerics::kernel {

constexpr int kPacket = 8;

struct alignas(16) Quad {
  uint32_t words[4];
};

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(Quad) == 0; }

/// Numbers [8 i, 8 i + 8) as they lie in memory, which begins at a multiple of 16 bytes.
template <NumberType kType>
struct Packet {
  static constexpr int kQuads = kType == NumberType::fp32 ? 2 : 1;
  Quad quads[kQuads];

  DEEPTIDE_HOST_DEVICE void load(const void* data, int64_t i) {
    for (int q = 0; q < kQuads; ++q) quads[q] = static_cast<const Quad*>(data)[kQuads * i + q];
  }
  DEEPTIDE_HOST_DEVICE void store(void* data, int64_t i) const {
    for (int q = 0; q < kQuads; ++q) static_cast<Quad*>(data)[kQuads * i + q] = quads[q];
  }

  /// `k` is known to the compiler where the loop around it is unrolled, as it must be: no array then lies on a stack.
  DEEPTIDE_HOST_DEVICE float value(int k) const {
    if constexpr (kType == NumberType::fp32) {
      return float_of(quads[k / 4].words[k % 4]);
    } else {
      const uint32_t both = quads[0].words[k / 2];
      return value_of(k % 2 == 0 ? both & 0xFFFFu : both >> 16, kType);
    }
  }
  /// Rounds once. In the order of `k`, from 0 on.
  DEEPTIDE_HOST_DEVICE void set(int k, float x) {
    if constexpr (kType == NumberType::fp32) {
      quads[k / 4].words[k % 4] = bits_of(x);
    } else {
      const uint32_t bits = kType == NumberType::bf16 ? to_bf16(x) : to_fp16(x);
      uint32_t& both = quads[0].words[k / 2];
      both = k % 2 == 0 ? bits : both | bits << 16;
    }
  }
};

}  // namespace deeptide::numerics::kernel
