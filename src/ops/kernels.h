// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The vector code behind the operators, and the plain code that its tests compare it with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deeptide::ops {

struct CrossEntropyTerms {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  double gradient_scale = 1.0;
};

/// Each row's loss into `losses_N` (fp32) and, if `gradient_NV` is defined, gradient_scale times its gradient, which
/// may be written over the logits. Logits and gradient: contiguous, one type, fp32 or bf16. A row with a NaN or an
/// infinite maximum gives NaN; an ignored one 0. Targets are valid. The result of a row does not depend on the others.
void cross_entropy_cpu(const at::Tensor& logits_NV, const at::Tensor& targets_N, const CrossEntropyTerms& terms,
                       const at::Tensor& losses_N, const at::Tensor& gradient_NV);

/// Contiguous, one type (fp32 or bf16), one size.
void gelu_tanh_cpu(const at::Tensor& x, const at::Tensor& y);
void gelu_tanh_backward_cpu(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& x_gradient);

/// Highway's name of the instruction set that the above run on here.
const char* kernel_target();

/// The same in torch's operators; any type and device, with gradients of any order.
at::Tensor cross_entropy_reference(const at::Tensor& logits_NV, const at::Tensor& targets_N, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing);

}  // namespace deeptide::ops
