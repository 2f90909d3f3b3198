// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranges of 16-bit floats to fp32 and back, on the CPU and on the calling thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deeptide::numerics {

/// bf16 or fp16: what `widen` reads and `round_to` writes.
constexpr bool is_half_width(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

/// to[i] = from[i], exactly. `from`: `count` elements of `dtype`.
void widen(const void* from, at::ScalarType dtype, int64_t count, float* to);
/// to[i] = from[i], rounded to nearest even, as torch does. `to`: `count` elements of `dtype`.
void round_to(void* to, at::ScalarType dtype, int64_t count, const float* from);

}  // namespace deeptide::numerics
