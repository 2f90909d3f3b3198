// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signs packed and unpacked by ATen operators, on any device.
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "numerics/rounding/sign_bits.h"

namespace deeptide::numerics::reference {

using at::Tensor;

namespace {

Tensor bit_values(at::Device device) {
  static constexpr std::array<uint8_t, 8> kBits{1, 2, 4, 8, 16, 32, 64, 128};
  return at::tensor(at::ArrayRef<uint8_t>(kBits), at::kByte).to(device);
}

/// scale * sign (N,) where `positive` (N,) says which sign.
Tensor signed_scale(const Tensor& positive, const Tensor& scale) { return at::where(positive, scale, -scale); }

Tensor unpacked(const Tensor& bits, int64_t numel) {
  return at::bitwise_and(bits.unsqueeze(1), bit_values(bits.device())).ne(0).view({-1}).narrow(0, 0, numel);
}

}  // namespace

void split_signs(const Tensor& values, const Tensor& scale, const Tensor& bits) {
  const Tensor positive = values.ge(0);
  const Tensor padded = at::zeros({bits.numel() * 8}, bits.options());
  padded.narrow(0, 0, values.numel()).copy_(positive);
  bits.copy_(padded.view({-1, 8}).mul(bit_values(bits.device())).sum(1, /*keepdim=*/false, at::kByte));
  values.sub_(signed_scale(positive, scale));
}

void set_signs(const Tensor& bits, const Tensor& scale, const Tensor& values) {
  values.copy_(signed_scale(unpacked(bits, values.numel()), scale));
}

void add_signs(const Tensor& bits, const Tensor& scale, const Tensor& values) {
  values.add_(signed_scale(unpacked(bits, values.numel()), scale));
}

}  // namespace deeptide::numerics::reference
