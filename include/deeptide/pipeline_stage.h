// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Trains one stage of a pipeline: what its engine exchanges with the other stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/engine.h"

namespace deeptide {

/// For InitOptions::axes: `ranks` ranks as a pipeline of so many stages. Consecutive ranks share a stage; its engines
/// are one data team, which shards, reduces and steps what the stage holds. Units: ranks.
/// Errors: ConfigError if the ranks do not divide among the stages, naming the nearest numbers of stages that do.
DEEPTIDE_API std::shared_ptr<const engine::Axes> pipeline_axes(int stages, int ranks);

/// The place of an engine that was made with pipeline_axes. Stages count from 0. Each rank exchanges tensors with the
/// ranks of the other stages that have its batches. Value type; the engine outlives it.
/// Errors, of all methods: CommError if a peer is lost or late.
class DEEPTIDE_API PipelineStage {
 public:
  /// Errors: ValueError if the engine has no stages.
  explicit PipelineStage(Engine& engine);

  int index() const;
  int num_stages() const;
  /// The device of the stage's parameters.
  at::Device device() const;
  int data_rank() const;
  int data_size() const;

  /// Sends a tensor on the CPU and returns at once. It must not change until `flush` or the next step's end.
  void send(const at::Tensor& tensor, int stage);
  /// Asks for the next tensor of a stage, and returns at once a number for `receive`. It fills `tensor`, which has the
  /// type and shape of what was sent.
  int64_t expect(const at::Tensor& tensor, int stage);
  /// Waits for it; serves the ranks of this stage meanwhile, which may be what its sender waits for.
  at::Tensor receive(int64_t letter);
  /// Waits until all that was sent has left; serves the ranks of this stage meanwhile.
  void flush();

  /// Runs autograd from outputs that a later stage took, whose gradients it has sent, scaled as fp16's losses are.
  /// Shapes: of each gradient, its output's. Errors: ValueError if their numbers differ.
  void backward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients);
  /// Gradients of parameters that autograd gives from now on wait under a number, begun anew, such as those of a
  /// micro-batch whose weights' gradients are computed later. Nothing: they enter the sums at once, as at first.
  void hold(std::optional<int64_t> number);
  /// Those that wait under the number enter the sums. Does nothing where none wait.
  void give(int64_t number);
  /// The gradient left @ right of a weight of this stage, scaled as fp16's losses are, enters the sums without
  /// autograd: it is computed where it is summed. Shapes: (N, K) and (K, M) for a weight (N, M). Returns false where it
  /// has to go to autograd instead, by `backward`: a hook of the program's asks for it, or it is no such weight's.
  /// Errors: ValueError if the factors do not fit together.
  bool add_product(const at::Tensor& weight, const at::Tensor& left, const at::Tensor& right);
  /// The next backward adds to a parameter's gradient a sum that other stages have computed, scaled as fp16's losses
  /// are, in the sum's type: in fp16 many micro-batches may overflow. Returns false where it has to go to autograd
  /// instead, by `backward`: types are equal, or a hook of the program's asks for the gradient.
  bool join(const at::Tensor& parameter, const at::Tensor& sum);
  /// After that backward: sums whose parameters got no gradient in it are their gradients.
  void take_joining();
  /// The next step() goes on without a gradient in this stage: a backward has passed it, and may have reached none of
  /// its parameters, as where the program called none of its blocks.
  void note_backward();
  /// This stage's part of a step ended in its middle, by an error: stages that wait for what it will not send hear why
  /// after "error_grace", whatever this one does next, until `begin_step`.
  void lose_step(const std::string& why);
  /// The stages have come to their next step together.
  void begin_step();
  /// Collective over the ranks of this stage. Waits until all have come here; those that are behind gather meanwhile.
  void meet();
  /// Collective over the stages. Returns every stage's values, equally many, one stage after the other. Serves
  /// nobody: where ranks of this stage may still gather, call `meet` first. `what`: for errors, equal on all stages.
  std::vector<double> exchange(const std::vector<double>& values,
                               const std::string& what = "exchanging numbers with the other stages");

 private:
  std::function<void()> serving();

  Engine::Impl& engine_;
};

}  // namespace deeptide
