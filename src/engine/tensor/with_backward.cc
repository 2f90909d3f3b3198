// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A node keeps the function of its backward in a capsule.
#include "engine/tensor/with_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace deeptide::engine {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Held : torch::CustomClassHolder {
  explicit Held(TensorFunction function) : function(std::move(function)) {}
  const TensorFunction function;
};

struct ByFunctions : torch::autograd::Function<ByFunctions> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const TensorFunction& forward,
                            const c10::intrusive_ptr<Held>& backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(backward);
    return forward(input);
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    refuse_second_derivative();
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["backward"].toCapsule());
    return {held->function(gradients[0]), {}, {}};
  }
};

}  // namespace

at::Tensor with_backward(const at::Tensor& input, const TensorFunction& forward, TensorFunction backward) {
  return ByFunctions::apply(input, forward, c10::make_intrusive<Held>(std::move(backward)));
}

void refuse_second_derivative() {
  TORCH_CHECK(!at::GradMode::is_enabled(), "layers that ranks share have no second derivative: leave out create_graph");
}

}  // namespace deeptide::engine
