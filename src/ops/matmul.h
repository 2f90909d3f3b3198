// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Matrix products by the faster of the two libraries in torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace deeptide::ops {

/// Whether oneDNN multiplies these instead of torch's BLAS. Depends on processor, type and shape alone, so that runs
/// repeat. MKL's fp32 code leaves AVX-512 unused on processors that are not Intel's.
bool onednn_multiplies(const at::Tensor& a_MK, const at::Tensor& b_NK);

/// Returns a bᵀ + bias, without a gradient. Shapes: a (M, K), b (N, K), bias (N,) -> (M, N). Any strides.
at::Tensor product_nt(const at::Tensor& a_MK, const at::Tensor& b_NK, const std::optional<at::Tensor>& bias_N = {});

}  // namespace deeptide::ops
