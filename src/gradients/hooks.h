// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Catches each parameter's gradient as autograd finishes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace deeptide::gradients {

/// Calls `sink(i, gradient)` when the gradient of parameter i is accumulated, then drops `.grad`: the bucket holds it.
/// Uses post hooks of the accumulator nodes, which it keeps alive; Python's own hooks stay usable. RAII: destruction
/// silences the hooks. Parameters must have their final dtype and be leaves that require grad.
class GradientHooks {
 public:
  using Sink = std::function<void(int, const at::Tensor&)>;
  /// `before`: called each time autograd is about to accumulate a gradient.
  GradientHooks(const std::vector<at::Tensor>& parameters, Sink sink, std::function<void()> before = {});
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;

  /// From now on calls `before` as the constructor's. Not while a backward runs.
  void announce(std::function<void()> before);
  /// Hooks each accumulator that replaced the one hooked before: `p.data = …` of another dtype makes a new one.
  /// Returns, by parameter, whether it had been replaced: its gradients since then lie in `.grad`.
  std::vector<bool> follow();
  /// Whether nothing but the sink asks for the gradient of parameter i: it is not watched, and there is no `before`.
  /// Then it may go to the sink's owner past autograd.
  bool is_alone(int index) const;
  /// Whether the program asks for it: by a hook, or by a `.grad` to add it to.
  bool is_watched(int index) const;

 private:
  struct State;
  void hook(size_t index);

  std::shared_ptr<State> state_;
};

}  // namespace deeptide::gradients
