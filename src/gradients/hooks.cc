// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Installs post hooks on gradient accumulators.
#include "gradients/hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "base/invariant.h"

namespace deeptide::gradients {

using at::Tensor;
using torch::autograd::variable_list;

/// Nodes are held by c10::intrusive_ptr from torch 2.13 on, by std::shared_ptr before.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const Tensor&>()));

struct GradientHooks::State {
  std::mutex mutex;  // a hook on another thread finishes before the sink is destroyed
  Sink sink;
  std::function<void()> before;
  std::vector<Tensor> parameters;
  std::vector<NodePtr> accumulators;
};

namespace {

template <typename State>
struct TakeGradient : torch::autograd::FunctionPostHook {
  TakeGradient(std::weak_ptr<State> state, int index, const Tensor& parameter)
      : state_(std::move(state)), index_(index), parameter_(parameter.getIntrusivePtr()) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    const auto state = state_.lock();
    auto impl = parameter_.lock();
    if (!state || !impl) return outputs;
    const Tensor parameter(std::move(impl));  // wrap_tensor_impl would access the data
    std::lock_guard lock(state->mutex);
    if (!state->sink || !parameter.grad().defined()) return outputs;
    const Tensor gradient = parameter.grad();
    parameter.mutable_grad().reset();
    state->sink(index_, gradient);
    return outputs;
  }

 private:
  std::weak_ptr<State> state_;
  int index_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter_;
};

template <typename State>
struct Announce : torch::autograd::FunctionPreHook {
  explicit Announce(std::weak_ptr<State> state) : state_(std::move(state)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto state = state_.lock()) {
      std::lock_guard lock(state->mutex);
      if (state->sink) state->before();
    }
    return gradients;
  }

 private:
  std::weak_ptr<State> state_;
};

/// Drops an accumulator of another shape, which an older graph keeps. Assigning to `.data` leaves it, and a backward
/// through it would expect gradients of that shape.
void drop_outdated_accumulator(const Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator || accumulator->input_metadata(0).shape_as_dim_vector() == parameter.sym_sizes()) return;
  torch::autograd::impl::get_autograd_meta(parameter)->grad_accumulator_.reset();
}

}  // namespace

GradientHooks::GradientHooks(const std::vector<Tensor>& parameters, Sink sink, std::function<void()> before)
    : state_(std::make_shared<State>()) {
  state_->sink = std::move(sink);
  state_->before = std::move(before);
  state_->parameters = parameters;
  state_->accumulators.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) hook(i);
}

void GradientHooks::hook(size_t index) {
  const Tensor& parameter = state_->parameters[index];
  drop_outdated_accumulator(parameter);
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  DEEPTIDE_INVARIANT(accumulator, "parameter ", index, " is not a leaf that requires grad");
  if (state_->before) accumulator->add_pre_hook(std::make_unique<Announce<State>>(state_));
  accumulator->add_post_hook(std::make_unique<TakeGradient<State>>(state_, static_cast<int>(index), parameter));
  state_->accumulators[index] = std::move(accumulator);
}

void GradientHooks::announce(std::function<void()> before) {
  std::lock_guard lock(state_->mutex);
  const bool is_hooked = state_->before != nullptr;
  state_->before = std::move(before);
  if (is_hooked) return;
  for (const NodePtr& accumulator : state_->accumulators) {
    accumulator->add_pre_hook(std::make_unique<Announce<State>>(state_));
  }
}

std::vector<bool> GradientHooks::follow() {
  std::vector<bool> replaced(state_->parameters.size(), false);
  for (size_t i = 0; i < replaced.size(); ++i) {
    const Tensor& parameter = state_->parameters[i];
    if (!parameter.requires_grad()) continue;  // frozen: nothing arrives, and its accumulator may come back
    if (torch::autograd::impl::try_get_grad_accumulator(parameter) == state_->accumulators[i]) continue;
    hook(i);
    replaced[i] = true;
  }
  return replaced;
}

bool GradientHooks::is_alone(int index) const { return !state_->before && !is_watched(index); }

bool GradientHooks::is_watched(int index) const {
  const Tensor& parameter = state_->parameters[index];
  const NodePtr& accumulator = state_->accumulators[index];
  const size_t own = state_->before ? 1 : 0;
  return !parameter.requires_grad() || parameter.grad().defined() ||
         torch::autograd::impl::try_get_grad_accumulator(parameter) != accumulator ||
         accumulator->pre_hooks().size() != own || !accumulator->tensor_pre_hooks().empty() ||
         accumulator->tensor_post_acc_grad_hooks() || accumulator->post_hooks().size() != 1;
}

GradientHooks::~GradientHooks() {
  std::lock_guard lock(state_->mutex);
  state_->sink = nullptr;
}

}  // namespace deeptide::gradients
