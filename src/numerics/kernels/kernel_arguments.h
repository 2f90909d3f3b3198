// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels' arguments: raw memory of numbers, and ranks' rows of them. No torch, so that any compiler reads it.
#pragma once

#include <cstdint>

namespace deeptide::numerics::kernel {

enum class NumberType : uint8_t { fp32, bf16, fp16 };

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

}  // namespace deeptide::numerics::kernel
