// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eight numbers at a time, in accesses of 16 bytes: with fewer bytes a thread a GPU's memory is not busy.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_numbers.h"

namespace deeptide::numerics::kernel {

struct alignas(16) Quad {
  uint32_t words[4];
};
static_assert(sizeof(Quad) == kAccessBytes);

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
  /// The same of `count` numbers in all: of those beyond, zeros are read and none written.
  DEEPTIDE_HOST_DEVICE void load(const void* data, int64_t i, int64_t count) {
    if ((i + 1) * kPacket <= count) return load(data, i);
    DEEPTIDE_UNROLLED for (int k = 0; k < kPacket; ++k) {
      set_bits(k, i * kPacket + k < count ? load_bits(data, kType, i * kPacket + k) : 0);
    }
  }
  DEEPTIDE_HOST_DEVICE void store(void* data, int64_t i, int64_t count) const {
    if ((i + 1) * kPacket <= count) return store(data, i);
    DEEPTIDE_UNROLLED for (int k = 0; k < kPacket; ++k) {
      if (i * kPacket + k < count) store_bits(bits(k), {data, kType}, i * kPacket + k);
    }
  }

  /// `k` is known to the compiler where the loop around it is unrolled, as it must be: no array then lies on a stack.
  DEEPTIDE_HOST_DEVICE float value(int k) const { return value_of(bits(k), kType); }
  /// Number `k` as it lies in memory.
  DEEPTIDE_HOST_DEVICE uint32_t bits(int k) const {
    if constexpr (kType == NumberType::fp32) {
      return quads[k / 4].words[k % 4];
    } else {
      const uint32_t both = quads[0].words[k / 2];
      return k % 2 == 0 ? both & 0xFFFFu : both >> 16;
    }
  }
  /// Rounds once. In the order of `k`, from 0 on.
  DEEPTIDE_HOST_DEVICE void set(int k, float x) {
    if constexpr (kType == NumberType::fp32) {
      set_bits(k, bits_of(x));
    } else {
      set_bits(k, kType == NumberType::bf16 ? to_bf16(x) : to_fp16(x));
    }
  }
  /// In any order, and those not set yet stay as they are.
  DEEPTIDE_HOST_DEVICE void replace_bits(int k, uint32_t bits) {
    static_assert(kType != NumberType::fp32, "set does");
    uint32_t& both = quads[0].words[k / 2];
    both = k % 2 == 0 ? (both & 0xFFFF0000u) | bits : (both & 0xFFFFu) | bits << 16;
  }
  /// Sets number `k` to what lies in memory for it, in the order of `set`.
  DEEPTIDE_HOST_DEVICE void set_bits(int k, uint32_t bits) {
    if constexpr (kType == NumberType::fp32) {
      quads[k / 4].words[k % 4] = bits;
    } else {
      uint32_t& both = quads[0].words[k / 2];
      both = k % 2 == 0 ? bits : both | bits << 16;
    }
  }
};

/// Packets out of one row of numbers.
template <NumberType kType>
struct RowReader {
  DEEPTIDE_HOST_DEVICE void load(Packet<kType>& packet, int64_t i) { packet.load(data, i); }
  DEEPTIDE_HOST_DEVICE float value(int64_t element) { return value_of(load_bits(data, kType, element), kType); }

  const void* data;
};

/// Packets out of pieces, of which one thread takes later and later ones.
template <NumberType kType>
struct PieceReader {
  /// To the last piece that begins at or before the element, if there is one.
  DEEPTIDE_HOST_DEVICE void seek(int64_t element) {
    int low = at, high = all.pieces;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (all.begin[middle] <= element ? low : high) = middle;
    }
    at = low;
  }
  DEEPTIDE_HOST_DEVICE void load(Packet<kType>& packet, int64_t i) {
    seek(i * kPacket);
    const int64_t first = i * kPacket - all.begin[at], count = all.count[at];
    if (first >= 0 && first + kPacket <= count) return packet.load(all.data[at], first / kPacket);
    DEEPTIDE_UNROLLED for (int k = 0; k < kPacket; ++k) {
      const bool is_there = first >= 0 && first + k < count;
      packet.set_bits(k, is_there ? load_bits(all.data[at], kType, first + k) : 0);
    }
  }
  DEEPTIDE_HOST_DEVICE float value(int64_t element) {
    seek(element);
    const int64_t own = element - all.begin[at];
    return own >= 0 && own < all.count[at] ? value_of(load_bits(all.data[at], kType, own), kType) : 0.0f;
  }

  const Pieces& all;
  int at = 0;
};

}  // namespace deeptide::numerics::kernel
