// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Autograd runs what is ready in the order of the nodes' numbers, the latest first:
//
//     forward    x → wait → send → x' → each layer's product
//     backward   the products' input gradients; send begins the sum; the weights' gradients; wait ends the sum
#include "engine/tensor/entry.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "deeptide/tensor_layers.h"
#include "engine/tensor/with_backward.h"

namespace deeptide {

using at::Tensor;
using engine::with_backward;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

namespace {

// Before all nodes that are not torch's own sums into a leaf.
constexpr uint64_t first = std::numeric_limits<uint64_t>::max() - 1;

/// A layer's parameters, which engines may empty between forward and backward.
struct Parameters : torch::CustomClassHolder {
  Parameters(Tensor weight, Tensor bias) : weight(std::move(weight)), bias(std::move(bias)) {}
  const Tensor weight, bias;

  static c10::intrusive_ptr<Parameters> of(AutogradContext* context) {
    return c10::static_intrusive_pointer_cast<Parameters>(context->saved_data["parameters"].toCapsule());
  }
};

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

/// A product whose backward gives its parameters' gradients alone. It returns a token of the shape, without values.
struct OfParameters : torch::autograd::Function<OfParameters> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    context->save_for_backward({x});
    context->saved_data["has_bias"] = bias.defined();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = weight.size(0);
    return x.new_empty({}).expand(shape);
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    engine::refuse_second_derivative();
    const Tensor rows = rows_of(gradients[0]);
    return {Tensor(), at::mm(rows.t(), rows_of(context->get_saved_variables()[0])),
            context->saved_data["has_bias"].toBool() ? rows.sum(0) : Tensor()};
  }
};

/// The same product, whose backward gives its input's gradient, and passes its own on to the token.
struct OfInput : torch::autograd::Function<OfInput> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& /*token*/,
                        const c10::intrusive_ptr<Parameters>& own) {
    context->saved_data["parameters"] = c10::IValue::make_capsule(own);
    const at::AutoGradMode as_in_training(
        true);  // sharded weights tell it from evaluation so; nothing has a graph here
    return at::linear(x.detach(), own->weight.detach(),
                      own->bias.defined() ? std::optional(own->bias.detach()) : std::nullopt);
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    engine::refuse_second_derivative();
    return {at::matmul(gradients[0], Parameters::of(context)->weight.detach()), gradients[0], {}};
  }
};

bool is_apart(const Tensor& x, const Tensor& weight) {
  const bool has_entered = x.grad_fn() && x.grad_fn()->sequence_nr() == first;
  return has_entered && weight.requires_grad() && at::GradMode::is_enabled() && x.dim() >= 2 && x.numel() > 0 &&
         x.scalar_type() == weight.scalar_type() && !at::autocast::is_autocast_enabled(x.device().type());
}

}  // namespace

Tensor enter_team(const Tensor& x, const TensorTeamPtr& team) {
  const auto detached = [](const Tensor& given) { return given.detach(); };
  const auto sum = std::make_shared<std::optional<TensorTeam::Sum>>();
  const Tensor waiting = with_backward(x, detached, [sum](const Tensor&) {
    Tensor result = sum->value().wait();
    sum->reset();
    return result;
  });
  Tensor sending = with_backward(waiting, detached, [sum, team](const Tensor& gradient) {
    sum->emplace(team->start_all_reduce(gradient, "backward"));
    return gradient;
  });
  if (sending.requires_grad()) sending.grad_fn()->set_sequence_nr(first);
  return sending;
}

Tensor engine::product_of(const Tensor& entered, const Tensor& weight, const Tensor& bias) {
  if (!is_apart(entered, weight)) {
    return at::linear(entered, weight, bias.defined() ? std::optional(bias) : std::nullopt);
  }
  const auto& send = entered.grad_fn();
  const Tensor token = OfParameters::apply(entered.detach(), weight, bias);
  token.grad_fn()->set_sequence_nr(send->next_edge(0).function->sequence_nr() + 1);  // after it, before `wait`
  return OfInput::apply(entered, token, c10::make_intrusive<Parameters>(weight, bias));
}

}  // namespace deeptide
