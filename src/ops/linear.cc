// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The linear layer and its gradient as three products.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "deeptide/ops.h"
#include "ops/dispatched.h"
#include "ops/fast_path.h"
#include "ops/matmul.h"

// Shapes: N rows, I inputs, O outputs.

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* context, const Tensor& input_NI, const Tensor& weight_OI,
                        const std::optional<Tensor>& bias_O) {
    context->save_for_backward({input_NI, weight_OI});
    const at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["bias"] = bias_O.has_value();
    return product_nt(input_NI, weight_OI, bias_O);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &input_NI = saved[0], &weight_OI = saved[1], &gradient_NO = gradients[0];
    // If a graph is recorded here, the products are torch's, which are differentiable.
    const auto product = [](const Tensor& a, const Tensor& b) {
      return at::GradMode::is_enabled() ? at::matmul(a, b.t()) : product_nt(a, b);
    };
    variable_list results(3);
    if (!gradient_NO.defined()) return results;
    if (context->needs_input_grad(0)) results[0] = product(gradient_NO, weight_OI.t());
    if (context->needs_input_grad(1)) results[1] = product(gradient_NO.t(), input_NI.t());
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) results[2] = gradient_NO.sum(0);
    return results;
  }
};

}  // namespace

Tensor linear_kernel(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool fits = input.dim() >= 1 && weight.dim() == 2 && input.size(-1) == weight.size(1) && input.numel() > 0 &&
                    (!bias || !bias->defined() || (bias->dim() == 1 && bias->size(0) == weight.size(0)));
  const bool fast = fits && fast_path(input) && fast_path(weight) && (!bias || !bias->defined() || fast_path(*bias));
  if (!fast) return at::linear(input, weight, bias);  // it also raises the right errors
  const Tensor input_NI = input.reshape({-1, input.size(-1)});
  if (!onednn_multiplies(input_NI, weight)) return at::linear(input, weight, bias);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  const bool has_bias = bias && bias->defined();
  return Linear::apply(input_NI, weight, has_bias ? bias : std::nullopt).view(sizes);
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = dispatched<decltype(linear_kernel)>("deeptide::linear");
  return op.call(input, weight, bias);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", linear_kernel);
}

}  // namespace deeptide::ops
