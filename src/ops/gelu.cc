// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// GELU by tanh with its gradient: torch's operator if it must be differentiated twice, our own otherwise.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "deeptide/ops.h"
#include "ops/dispatched.h"
#include "ops/fast_path.h"
#include "ops/kernels.h"

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

Tensor gelu_tanh_gradient(const Tensor& gradient, const Tensor& x) {
  if (at::GradMode::is_enabled() || !fast_path(gradient)) return at::gelu_backward(gradient, x, "tanh");
  const Tensor x_whole = x.contiguous();
  Tensor x_gradient = at::empty_like(x_whole);
  gelu_tanh_backward_cpu(gradient.to(x.scalar_type()).contiguous(), x_whole, x_gradient);
  return x_gradient;
}

struct GeluTanh : torch::autograd::Function<GeluTanh> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor x_whole = x.contiguous();
    Tensor y = at::empty_like(x_whole);
    gelu_tanh_cpu(x_whole, y);
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {gelu_tanh_gradient(gradients[0], context->get_saved_variables()[0])};
  }
};

}  // namespace

Tensor gelu_tanh_kernel(const Tensor& x) { return fast_path(x) ? GeluTanh::apply(x) : at::gelu(x, "tanh"); }

Tensor gelu_tanh(const Tensor& x) {
  static const auto op = dispatched<decltype(gelu_tanh_kernel)>("deeptide::gelu_tanh");
  return op.call(x);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) { library.def("gelu_tanh(Tensor x) -> Tensor", gelu_tanh_kernel); }

}  // namespace deeptide::ops
