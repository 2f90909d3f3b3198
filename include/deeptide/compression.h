// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Smaller models by training: weights and inputs of few bits, pruning, fewer layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide {

class Engine;

/// The range of a layer's inputs, a moving average while training. A checkpoint keeps it.
class DEEPTIDE_API ActivationRangeImpl : public torch::nn::Module {
 public:
  explicit ActivationRangeImpl(const at::Tensor& like);
  /// (lowest, highest), in the type of x.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x);

  at::Tensor x_min_max;
};
TORCH_MODULE(ActivationRange);

/// How a layer's input is rounded: by a range of its own for each token (each image), or by one range.
struct DEEPTIDE_API InputQuantization {
  int64_t bits = 8;
  bool is_symmetric = true;
  int64_t offset = 0;
  ActivationRange range = nullptr;  // of static calibration
  bool on = false;

  /// The input, rounded; its gradient passes as it is. Shapes: (…, I), an image (N, I, H, W).
  at::Tensor values(const at::Tensor& x, bool is_image);
};

/// torch's layer, whose input may be quantised: "activation_quantization" selects no others, since a program calls
/// torch's own directly. All other techniques take torch's layers as well.
class DEEPTIDE_API CompressedLinearImpl : public torch::nn::LinearImpl {
 public:
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<InputQuantization> input;  // null until init_compression gives it one
};
TORCH_MODULE(CompressedLinear);

class DEEPTIDE_API CompressedConv2dImpl : public torch::nn::Conv2dImpl {
 public:
  using Conv2dImpl::Conv2dImpl;
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<InputQuantization> input;
};
TORCH_MODULE(CompressedConv2d);

/// A power iteration ends after `max_iter` products with the Hessian, or once the value moves by less than `tol` of
/// itself.
struct PowerIteration {
  int64_t max_iter = 100;
  double tol = 1e-2;
  double stability = 0.0;  // added to the norm of the vector
  double scale = 1.0;      // the loss scale of the gradients
};
struct Eigenvalue {
  double value = 0.0;
  int64_t iterations = 0;
};

/// The largest eigenvalue, by magnitude, of the Hessian of a loss in `parameters`. `gradients`: the loss's, one for
/// each, with a graph of their own. Starts from what torch's generator would draw next, and draws nothing from it.
/// Errors: c10::Error where an operator has no second derivative. Source: Dong et al., HAWQ, arXiv:1905.03696.
DEEPTIDE_API Eigenvalue largest_eigenvalue(const std::vector<at::Tensor>& parameters,
                                           const std::vector<at::Tensor>& gradients, const PowerIteration& how);

/// The techniques of a model's layers, by the optimizer steps so far. It refers to the model's layers.
class DEEPTIDE_API Compression : public std::enable_shared_from_this<Compression> {
 public:
  ~Compression();
  Compression(const Compression&) = delete;
  Compression& operator=(const Compression&) = delete;

  /// Gives layers the weights of now: call it before each forward, in training and evaluation. `layer->weight` is then
  /// computed from the parameter of that name, to which its gradient goes.
  void before_forward();
  /// Collective. The model's engine keeps the schedule from now on: it shares the first rank's masks, calls
  /// before_backward() and step(), and its checkpoints save and load the place of the schedule. Errors: ValueError if
  /// it keeps another one.
  void follow(Engine& engine);
  /// Collective. Call it before the backward of a step's last loss, unless an engine does: where "quantize_training"
  /// asks for eigenvalues and the step lowers bits, it measures the curvature of blocks. `mean`: as Engine::mean.
  /// Errors: ConfigError where an operator of the model has no second derivative.
  void before_backward(const at::Tensor& loss, const std::function<double(double)>& mean);
  /// Call it after an optimizer step that was applied, unless an engine does.
  void step();
  /// Collective. All ranks prune what the first one does. `broadcast`: as Engine::broadcast.
  void share_masks(const std::function<void(const at::Tensor&, int)>& broadcast);
  /// Makes compression final: weights are rounded, zeros are written, and where a group names related_modules, rows,
  /// heads or channels are removed, and what belongs to them there. Inputs stay quantised. For a model whose values are
  /// its own, so not while an engine has it. Errors: ConfigError.
  void redundancy_clean();

  /// The client state with the schedule's place in it. Python's engine reads it, too.
  std::string add_state(const std::string& client_state_json) const;
  /// Goes on where a saved client state was; false if it has none. Errors: ConfigError if it cannot be read.
  bool take_state(const std::string& client_state_json);

 private:
  friend DEEPTIDE_API std::shared_ptr<Compression> init_compression(torch::nn::Module& model, const Config& config,
                                                                    torch::nn::Module* teacher);
  struct Impl;
  explicit Compression(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Gives layers what "compression_training" says, before `initialize`: masks become buffers, and scores of "topk"
/// parameters, under DeepSpeed's names. A reduction of layers copies the teacher's. Errors: ConfigError naming the key.
/// Source: DeepSpeed 0.19.6; Q-BERT's MoQ for falling bits.
DEEPTIDE_API std::shared_ptr<Compression> init_compression(torch::nn::Module& model, const Config& config,
                                                           torch::nn::Module* teacher = nullptr);

}  // namespace deeptide
