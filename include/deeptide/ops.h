// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Operators that are faster than torch's on a CPU; elsewhere, and for other types, torch's own run.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "deeptide/export.h"

/// Dispatcher operators `deeptide::…` with gradients; sharded parameters arrive whole. Fast for fp32 and bf16 on the
/// CPU, with one result for any number of threads. All else (other types and devices, autocast, torch.func, tracing)
/// uses torch's operators and their semantics, but linear_cross_entropy, which saves memory on devices too. A second
/// derivative needs double, which uses torch.
namespace deeptide::ops {

/// Returns input weightᵀ + bias. Shapes: input (…, I), weight (O, I), bias (O,) or undefined -> (…, O).
/// If torch's BLAS leaves half of the processor unused (fp32, AVX-512, not Intel's), oneDNN multiplies.
DEEPTIDE_API at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias = {});

/// torch's cross_entropy without class weights; computes the gradient along with the loss.
/// Shapes: logits (N, V), targets (N,) int64 -> a scalar, or (N,) with Reduction::None; fp32 for bf16 logits too.
/// Errors: IndexError for a target that is neither a class nor `ignore_index`; ValueError for shapes.
DEEPTIDE_API at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index = -100,
                                      int64_t reduction = at::Reduction::Mean, double label_smoothing = 0.0);

/// Returns cross_entropy(hidden weightᵀ + bias, targets), some rows at a time: at most 32 MiB of logits exist at once,
/// on a device 256 MiB and their shares in fp32; fp16 and double use torch's operators, which keep all of them. On the
/// CPU, rows whose target is `ignore_index` are left out of every product, forward and backward. Shapes: hidden (N, D),
/// weight (V, D), targets (N,), bias (V,) -> a scalar in fp32. Reduction: Mean or Sum.
DEEPTIDE_API at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                             const at::Tensor& targets, int64_t ignore_index = -100,
                                             int64_t reduction = at::Reduction::Mean, double label_smoothing = 0.0,
                                             const std::optional<at::Tensor>& bias = {});

/// torch's scaled_dot_product_attention without dropout. Shapes: query (N, H, R, D), key and value (N, H, C, D), mask
/// expandable to (N, H, R, C) -> (N, H, R, D). Fast for bf16 and up to 1024 keys on processors that multiply bf16;
/// scores are bf16 there, as in torch's products, and are computed again in backward. A mask gets no gradient from
/// that.
DEEPTIDE_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const std::optional<at::Tensor>& mask = {}, bool causal = false,
                                  std::optional<double> scale = {});

/// Returns x times the normal distribution's integral at x, by its tanh approximation (arXiv:1606.08415). Any shape.
DEEPTIDE_API at::Tensor gelu_tanh(const at::Tensor& x);

/// torch's layer_norm over the last dimensions, `normalized_shape`. Statistics are fp32 for every input type.
DEEPTIDE_API at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef normalized_shape,
                                   const std::optional<at::Tensor>& weight = {},
                                   const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

/// Returns layer_norm(x + residual) and x + residual, the start of the next residual branch, in one pass.
DEEPTIDE_API std::tuple<at::Tensor, at::Tensor> residual_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                                    at::IntArrayRef normalized_shape,
                                                                    const std::optional<at::Tensor>& weight = {},
                                                                    const std::optional<at::Tensor>& bias = {},
                                                                    double eps = 1e-5);

/// torch's layer_norm over the last dimension. Keeps its result for backward and not its input, which
/// (result - bias) / weight gives, normalized; a weight of 0 gets no gradient.
/// Errors: RuntimeError in a backward with create_graph.
DEEPTIDE_API at::Tensor invertible_layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                              double eps = 1e-5);

}  // namespace deeptide::ops
