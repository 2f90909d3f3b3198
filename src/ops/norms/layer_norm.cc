// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layer normalization, alone or of a residual sum, with the gradients of both results.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "deeptide/ops.h"
#include "ops/dispatched.h"
#include "ops/fast_path.h"
#include "ops/kernels.h"

// Shapes: N rows of D elements; D is the product of `normalized_shape`.

namespace deeptide::ops {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // x's (and the residual's), weight's, bias's

Gradients layer_norm_backward_kernel(const Tensor& normed_gradient, const OptionalTensor& summed_gradient,
                                     const Tensor& summed, const Tensor& mean_N, const Tensor& rstd_N,
                                     const OptionalTensor& weight) {
  const auto type = summed.scalar_type();
  const int64_t width = summed.numel() / mean_N.numel();
  const auto fp32 = mean_N.options();
  const LayerNormGradients from{normed_gradient.to(type).contiguous(),
                                summed_gradient ? summed_gradient->to(type).contiguous() : Tensor(),
                                summed.contiguous(),
                                mean_N,
                                rstd_N,
                                weight ? weight->to(at::kFloat).contiguous() : at::ones({width}, fp32)};
  const LayerNormInputGradients to{at::empty_like(from.summed), at::empty({width}, fp32), at::empty({width}, fp32)};
  layer_norm_backward_cpu(from, to);
  return {to.x, to.weight_D, to.bias_D};
}

namespace {

OptionalTensor optional(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

/// Calls through the dispatcher, whose gate makes a sharded weight whole.
Gradients layer_norm_backward(const Tensor& normed_gradient, const Tensor& summed_gradient, const Tensor& summed,
                              const Tensor& mean_N, const Tensor& rstd_N, const Tensor& weight) {
  static const auto op = dispatched<decltype(layer_norm_backward_kernel)>("deeptide::layer_norm_backward");
  return op.call(normed_gradient, optional(summed_gradient), summed, mean_N, rstd_N, optional(weight));
}

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  /// Returns the normalized rows and, if there is a residual, the sum. Optionals with a value are defined.
  static variable_list forward(AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, IntArrayRef shape,
                               double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const int64_t width = c10::multiply_integers(shape), rows = x.numel() / width;
    const auto fp32 = x.options().dtype(at::kFloat);
    const LayerNormInputs from{x.contiguous(), residual ? residual->contiguous() : Tensor(),
                               weight ? weight->to(at::kFloat).contiguous() : at::ones({width}, fp32),
                               bias ? bias->to(at::kFloat).contiguous() : at::zeros({width}, fp32), eps};
    const LayerNormResults to{at::empty(x.sizes(), x.options()),
                              residual ? at::empty(x.sizes(), x.options()) : Tensor(), at::empty({rows}, fp32),
                              at::empty({rows}, fp32)};
    layer_norm_cpu(from, to);
    context->saved_data["shape"] = shape;
    context->saved_data["residual"] = residual.has_value();
    context->set_materialize_grads(false);
    context->save_for_backward(
        {residual ? to.summed : x, to.mean_N, to.rstd_N, weight.value_or(Tensor()), bias.value_or(Tensor())});
    return residual ? variable_list{to.normed, to.summed} : variable_list{to.normed};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor normed_gradient = gradients[0], summed_gradient = gradients.size() > 1 ? gradients[1] : Tensor();
    const bool residual = context->saved_data["residual"].toBool();
    variable_list results(6);
    if (!normed_gradient.defined()) {
      results[0] = summed_gradient;
    } else if (at::GradMode::is_enabled() || !fast_path(normed_gradient)) {
      std::tie(results[0], results[2], results[3]) = torchs_gradients(context, normed_gradient);
      if (summed_gradient.defined()) results[0] = results[0] + summed_gradient;
    } else {
      std::tie(results[0], results[2], results[3]) = our_gradients(context, normed_gradient, summed_gradient);
    }
    if (residual) results[1] = results[0];
    return results;
  }

 private:
  static Gradients our_gradients(AutogradContext* context, const Tensor& normed_gradient,
                                 const Tensor& summed_gradient) {
    const auto saved = context->get_saved_variables();
    const Tensor &weight = saved[3], &bias = saved[4];
    const auto [x, weight_D, bias_D] =
        layer_norm_backward(normed_gradient, summed_gradient, saved[0], saved[1], saved[2], weight);
    const auto as = [](const Tensor& parameter, const Tensor& gradient_D) {
      return parameter.defined() ? gradient_D.to(parameter.scalar_type()).view(parameter.sizes()) : Tensor();
    };
    return {x, as(weight, weight_D), as(bias, bias_D)};
  }

  /// Uses torch's operator, which is differentiable, and wants the statistics in the parameters' type.
  static Gradients torchs_gradients(AutogradContext* context, const Tensor& gradient) {
    const auto saved = context->get_saved_variables();
    const Tensor &summed = saved[0], &weight = saved[3], &bias = saved[4];
    const auto shape = context->saved_data["shape"].toIntVector();
    auto sizes = summed.sizes().vec();
    std::fill(sizes.end() - static_cast<std::ptrdiff_t>(shape.size()), sizes.end(), 1);
    const Tensor& typed = weight.defined() ? weight : bias.defined() ? bias : summed;
    const auto statistic = [&](const Tensor& each_N) { return each_N.to(typed.scalar_type()).view(sizes); };
    return at::native_layer_norm_backward(gradient, summed, shape, statistic(saved[1]), statistic(saved[2]),
                                          optional(weight), optional(bias), {true, weight.defined(), bias.defined()});
  }
};

/// Whether our kernels take these arguments; otherwise torch's give the answer, or the right error.
bool takes(const Tensor& x, const OptionalTensor& residual, IntArrayRef shape, const OptionalTensor& weight,
           const OptionalTensor& bias) {
  if (!fast_path(x) || x.numel() == 0 || shape.empty() || x.dim() < static_cast<int64_t>(shape.size())) return false;
  const auto fits = [&](const OptionalTensor& parameter) {
    return !parameter || (fast_path(*parameter) && parameter->sizes() == shape &&
                          (parameter->scalar_type() == x.scalar_type() || parameter->scalar_type() == at::kFloat));
  };
  return x.sizes().slice(x.dim() - shape.size()) == shape && fits(weight) && fits(bias) &&
         (!weight || !bias || weight->scalar_type() == bias->scalar_type()) &&
         (!residual ||
          (fast_path(*residual) && residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type()));
}

OptionalTensor defined(const OptionalTensor& tensor) { return tensor && tensor->defined() ? tensor : std::nullopt; }

}  // namespace

Tensor layer_norm_kernel(const Tensor& x, IntArrayRef normalized_shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps) {
  const OptionalTensor w = defined(weight), b = defined(bias);
  if (!takes(x, {}, normalized_shape, w, b)) return at::layer_norm(x, normalized_shape, w, b, eps);
  return LayerNorm::apply(x, OptionalTensor(), w, b, normalized_shape, eps)[0];
}

std::tuple<Tensor, Tensor> residual_layer_norm_kernel(const Tensor& x, const Tensor& residual,
                                                      IntArrayRef normalized_shape, const OptionalTensor& weight,
                                                      const OptionalTensor& bias, double eps) {
  const OptionalTensor w = defined(weight), b = defined(bias);
  if (!takes(x, residual, normalized_shape, w, b)) {
    const Tensor summed = at::add(x, residual);
    return {at::layer_norm(summed, normalized_shape, w, b, eps), summed};
  }
  const auto results = LayerNorm::apply(x, OptionalTensor(residual), w, b, normalized_shape, eps);
  return {results[0], results[1]};
}

Tensor layer_norm(const Tensor& x, IntArrayRef normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  static const auto op = dispatched<decltype(layer_norm_kernel)>("deeptide::layer_norm");
  return op.call(x, normalized_shape, weight, bias, eps);
}

std::tuple<Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual, IntArrayRef normalized_shape,
                                               const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static const auto op = dispatched<decltype(residual_layer_norm_kernel)>("deeptide::residual_layer_norm");
  return op.call(x, residual, normalized_shape, weight, bias, eps);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def(
      "layer_norm(Tensor x, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) "
      "-> Tensor",
      layer_norm_kernel);
  library.def(
      "residual_layer_norm(Tensor x, Tensor residual, int[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05) -> (Tensor, Tensor)",
      residual_layer_norm_kernel);
  library.def(
      "layer_norm_backward(Tensor normed_gradient, Tensor? summed_gradient, Tensor summed, Tensor mean, "
      "Tensor rstd, Tensor? weight) -> (Tensor, Tensor, Tensor)",
      layer_norm_backward_kernel);
}

}  // namespace deeptide::ops
