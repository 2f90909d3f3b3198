// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The vector code behind the operators, and the plain code that tests compare it with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deeptide::ops {

struct CrossEntropyTerms {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  double gradient_scale = 1.0;
};

/// Writes each row's loss to `losses_N` (fp32) and, if `gradient_NV` is defined, gradient_scale times its gradient,
/// which may overwrite the logits. Logits and gradient: contiguous, one type, fp32 or bf16. A row with a NaN or an
/// infinite maximum gives NaN; an ignored row gives 0. Targets must be valid. Rows do not affect each other.
void cross_entropy_cpu(const at::Tensor& logits_NV, const at::Tensor& targets_N, const CrossEntropyTerms& terms,
                       const at::Tensor& losses_N, const at::Tensor& gradient_NV);

/// Contiguous, one type (fp32 or bf16), one size.
void gelu_tanh_cpu(const at::Tensor& x, const at::Tensor& y);
void gelu_tanh_backward_cpu(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& x_gradient);

/// Highway's name of the instruction set on which the above kernels run here.
const char* kernel_target();

// Layer normalization of N rows of D elements. The shapes of the rows' tensors do not matter: N is the size of mean_N.
// All are contiguous; rows have one type, fp32 or bf16; one-dimensional tensors are fp32.

struct LayerNormInputs {
  at::Tensor x, residual, weight_D, bias_D;  // residual may be undefined: then `summed` is x and not written
  double eps = 1e-5;
};
struct LayerNormResults {
  at::Tensor normed, summed, mean_N, rstd_N;
};

/// Adds the residual and normalizes each row of the sum as rounded. Rows do not affect each other.
void layer_norm_cpu(const LayerNormInputs& from, const LayerNormResults& to);

struct LayerNormGradients {
  at::Tensor normed_gradient, summed_gradient, summed, mean_N, rstd_N, weight_D;  // summed_gradient may be undefined
};
struct LayerNormInputGradients {
  at::Tensor x, weight_D, bias_D;  // x's gradient is also the residual's
};

/// Sums weight's and bias's gradients over rows in an order that depends on N alone, not on the threads.
void layer_norm_backward_cpu(const LayerNormGradients& from, const LayerNormInputGradients& to);

struct AttentionTerms {
  double scale = 1.0;
  bool causal = false;   // query r sees keys 0 to r
  at::Tensor mask_NHRC;  // added to scaled scores: fp32, a view that may repeat rows; undefined if there is none
};

/// Turns scores (P, R, C), contiguous bf16, into their softmax in place. Pairs of a sequence and a head are numbered
/// from `first_pair`. A row whose scores are all masked gets zeros; one with a NaN or +inf, NaN.
void attention_shares_cpu(const at::Tensor& scores_PRC, const AttentionTerms& terms, int64_t first_pair);

/// Turns the gradient of shares, both contiguous bf16, into that of the unscaled scores in place.
void attention_gradient_cpu(const at::Tensor& shares_PRC, const at::Tensor& gradient_PRC, double scale);

/// The same by torch's operators, on any device. The gradient is multiplied by `scale` too, a number on the device; it
/// may be undefined. A target that is no class is torch's to find.
void cross_entropy_rows(const at::Tensor& logits_NV, const at::Tensor& targets_N, const CrossEntropyTerms& terms,
                        const at::Tensor& scale, const at::Tensor& losses_N, const at::Tensor& gradient_NV);

/// Computes cross-entropy with torch's operators; any type and device, with gradients of any order.
at::Tensor cross_entropy_reference(const at::Tensor& logits_NV, const at::Tensor& targets_N, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing);

}  // namespace deeptide::ops
