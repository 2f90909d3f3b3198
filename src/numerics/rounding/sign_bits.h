// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Vectors as one bit per element and one scale: what 1-bit optimizers send, and what it leaves out.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deeptide::numerics {

/// Bytes of the signs of `numel` elements.
constexpr int64_t sign_bytes(int64_t numel) { return (numel + 7) / 8; }

/// Shapes below: values (N,) fp32; scale (1,) fp32; bits (sign_bytes(N),) uint8; contiguous, on one device. N may be 0.
/// Bit i % 8 of byte i / 8 is 1 where element i is at least 0: the sign of zero is plus.
/// Errors: ValueError on tensors that do not fit.

/// Writes the signs of `values` to `bits` and subtracts scale * sign from `values`: the error that is left.
void split_signs(const at::Tensor& values, const at::Tensor& scale, const at::Tensor& bits);
/// values = scale * sign.
void set_signs(const at::Tensor& bits, const at::Tensor& scale, const at::Tensor& values);
/// values += scale * sign.
void add_signs(const at::Tensor& bits, const at::Tensor& scale, const at::Tensor& values);

/// The same in ATen operators: the tests' oracle, and what devices without a kernel of their own run.
namespace reference {
void split_signs(const at::Tensor& values, const at::Tensor& scale, const at::Tensor& bits);
void set_signs(const at::Tensor& bits, const at::Tensor& scale, const at::Tensor& values);
void add_signs(const at::Tensor& bits, const at::Tensor& scale, const at::Tensor& values);
}  // namespace reference

}  // namespace deeptide::numerics
