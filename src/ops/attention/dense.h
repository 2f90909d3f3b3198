// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attention in bf16 by products of some heads at a time, and by torch's differentiable operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "ops/kernels.h"

// Shapes: N sequences, H heads, R queries, C keys, D elements of a head.

namespace deeptide::ops {

/// Takes bf16 in CPU memory, any strides. The result lies in memory as (N, R, H, D).
at::Tensor attend(const at::Tensor& query_NHRD, const at::Tensor& key_NHCD, const at::Tensor& value_NHCD,
                  const AttentionTerms& terms);

/// Returns the gradients of query, key and value. Computes the scores again.
std::array<at::Tensor, 3> attend_backward(const at::Tensor& gradient_NHRD, const at::Tensor& query_NHRD,
                                          const at::Tensor& key_NHCD, const at::Tensor& value_NHCD,
                                          const AttentionTerms& terms);

/// The same for any type and device, and differentiable.
std::array<at::Tensor, 3> attend_backward_reference(const at::Tensor& gradient_NHRD, const at::Tensor& query_NHRD,
                                                    const at::Tensor& key_NHCD, const at::Tensor& value_NHCD,
                                                    const AttentionTerms& terms);

}  // namespace deeptide::ops
