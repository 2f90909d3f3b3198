// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels' arguments: raw memory of numbers, and ranks' rows of them. No torch, so that any compiler reads it.
#pragma once

#include <cstdint>

namespace deeptide::numerics::kernel {

enum class NumberType : uint8_t { fp32, bf16, fp16 };

inline constexpr int kPacket = 8;  // numbers that one thread takes at a time
inline constexpr int kAccessBytes = 16;

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0; }

/// Numbers in a device's memory; null: none.
struct Numbers {
  void* data = nullptr;
  NumberType type = NumberType::fp32;
};

/// The ranks' rows of a gradient, to be added by pairs in fp32, then scaled.
struct Rows {
  static constexpr int kMost = 64;
  static constexpr int kLevels = 6;  // of pairs
  const void* data[kMost] = {};
  int count = 0;
  NumberType type = NumberType::fp32;
  float scale = 1.0f;
};

/// One rank's gradient where its parts lie: what is between them is zero, and no copy has joined them. Each begins at a
/// multiple of eight elements and of 16 bytes, behind the one before.
struct Pieces {
  static constexpr int kMost = 64;
  const void* data[kMost] = {};
  int64_t begin[kMost] = {};
  int64_t count[kMost] = {};
  int pieces = 0;  // 0: the gradient is given as rows
  NumberType type = NumberType::fp32;
  float scale = 1.0f;
};

/// One row as one piece.
inline Pieces one_piece(const Rows& row, int64_t count) {
  return {{row.data[0]}, {0}, {count}, 1, row.type, row.scale};
}

/// The random bits of one step, as numerics::RandomKey has them.
struct RandomBits {
  uint32_t first[2] = {};  // of two streams each
  uint32_t second[2] = {};
  int64_t index = 0;  // of the first element
};

}  // namespace deeptide::numerics::kernel
