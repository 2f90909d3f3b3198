// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lends weights to other stages, and adds up their gradients.
#include "engine/pipeline/shared_weights.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

namespace deeptide::engine {

SharedWeights::SharedWeights(const PipelineModule& model) {
  constexpr int64_t kMostOfOne = 1 << 20;
  for (const PipelineModule::Tie& tie : model.ties()) {
    int64_t number = tie.number * kMostOfOne;
    const bool is_owner = tie.stages.front() == model.stage();
    for (const at::Tensor& parameter : tie.module->parameters()) {
      if (is_owner) {
        owned_.push_back({number++, parameter, {tie.stages.begin() + 1, tie.stages.end()}});
      } else {
        borrowed_.push_back({number++, parameter, {}, tie.stages.front()});
      }
    }
  }
}

std::map<int, int64_t> SharedWeights::letters(bool training) const {
  std::map<int, int64_t> due;
  for (const Weight& weight : borrowed_) ++due[weight.owner];
  if (!training) return due;
  for (const Weight& weight : owned_) {
    for (const int stage : weight.borrowers) ++due[stage];
  }
  return due;
}

void SharedWeights::exchange_values(Letters& letters, int64_t step) {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : owned_) {
    const at::Tensor value = weight.parameter.detach().clone();
    for (const int stage : weight.borrowers)
      letters.send({LetterKind::tied_weight, weight.number, 0, step}, {value}, stage, /*is_own=*/true);
  }
  for (Weight& weight : borrowed_) {
    const Activations value = letters.receive({LetterKind::tied_weight, weight.number, 0, step}, weight.owner);
    weight.parameter.set_data(value.front());
    weight.parameter.mutable_grad().reset();
    weight.sum.reset();
  }
}

void SharedWeights::add_gradients() {
  const at::NoGradGuard no_grad;
  for (Weight& weight : borrowed_) {
    if (!weight.parameter.grad().defined()) continue;
    const at::Tensor gradient =
        weight.parameter.grad().to(c10::promoteTypes(weight.parameter.scalar_type(), at::kFloat));
    weight.parameter.mutable_grad().reset();
    weight.sum = weight.sum.defined() ? weight.sum.add_(gradient) : gradient;
  }
}

void SharedWeights::send_gradients(Letters& letters, int64_t step) {
  for (Weight& weight : borrowed_) {
    letters.send({LetterKind::tied_gradient, weight.number, 0, step}, {weight.sum}, weight.owner, /*is_own=*/true);
    weight.sum.reset();
  }
}

std::pair<Activations, Activations> SharedWeights::take_gradients(Letters& letters, int64_t step) const {
  std::pair<Activations, Activations> found;
  for (const Weight& weight : owned_) {
    at::Tensor sum;
    for (const int stage : weight.borrowers) {
      const Activations gradient = letters.receive({LetterKind::tied_gradient, weight.number, 0, step}, stage);
      if (gradient.front().defined()) sum = sum.defined() ? sum + gradient.front() : gradient.front();
    }
    if (!sum.defined()) continue;
    found.first.push_back(weight.parameter);
    found.second.push_back(sum);
  }
  return found;
}

}  // namespace deeptide::engine
