// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A layer norm that keeps its output for backward.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <numeric>

#include "deeptide/ops.h"
#include "ops/dispatched.h"

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct InvertibleNorm : torch::autograd::Function<InvertibleNorm> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        double eps) {
    const auto [y, mean, scale] = at::native_layer_norm(x, {x.size(-1)}, weight, bias, eps);
    context->save_for_backward({y, weight, bias, scale});
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "invertible_layer_norm: the norm has no second derivative: leave out create_graph");
    const auto saved = context->get_saved_variables();
    const Tensor &y = saved[0], &weight = saved[1], &bias = saved[2];
    const auto wide = c10::promoteTypes(y.scalar_type(), at::kFloat);
    const Tensor g = gradients[0].to(wide), w = weight.to(wide);
    const Tensor zero = at::scalar_tensor(0.0, y.options().dtype(wide));
    const Tensor normed = at::where(w == 0, zero, (y.to(wide) - bias.to(wide)) / w);  // a weight of 0 has lost it
    const Tensor wg = g * w;
    const Tensor mean = wg.mean(-1, /*keepdim=*/true), along = (wg * normed).mean(-1, /*keepdim=*/true);
    const Tensor x_gradient = saved[3].to(wide) * (wg - mean - normed * along);
    std::vector<int64_t> rows(static_cast<size_t>(y.dim() - 1));
    std::iota(rows.begin(), rows.end(), 0);
    return {x_gradient.to(y.scalar_type()), (g * normed).sum(rows).to(weight.scalar_type()),
            g.sum(rows).to(bias.scalar_type()), Tensor()};
  }
};

}  // namespace

Tensor invertible_layer_norm_kernel(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return InvertibleNorm::apply(x, weight, bias, eps);
}

Tensor invertible_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  static const auto op = dispatched<decltype(invertible_layer_norm_kernel)>("deeptide::invertible_layer_norm");
  return op.call(x, weight, bias, eps);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def("invertible_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-05) -> Tensor",
              invertible_layer_norm_kernel);
}

}  // namespace deeptide::ops
