// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Changes one layer: its weight quantised, its input quantised, parts of its weight left out.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace deeptide::compression {

/// How a layer's weight is rounded. With `in_forward`, to the target's bits; else the bits fall over the steps.
struct WeightQuantization {
  int64_t bits, target_bits, period, groups;
  bool is_symmetric, is_stochastic, in_forward;
  int64_t offset;
  int64_t number;  // of the layer, for its noise
  bool on = false;
  double share_kept = 0.0;  // of the weight as it is, in a mixture
  int64_t draws = 0;        // optimizer steps for which noise was drawn

  at::Tensor values(const at::Tensor& weight) const;
};

/// Which part of a layer's weight stays: the largest by magnitude, or by scores that are trained.
struct Pruning {
  std::string technique;
  bool by_scores;
  double share;
  int64_t offset;
  int64_t heads;
  bool on = false;

  /// Whether the layer has a mask or scores of the technique.
  bool is_prepared(const torch::nn::Module& layer) const;
  /// Adds the mask or the scores to the layer.
  void prepare(torch::nn::Module& layer, const at::Tensor& weight) const;
  /// The mask of what stays: of weights, of outputs (N, 1, …) or of heads (1, H). A gradient goes to scores.
  at::Tensor mask(torch::nn::Module& layer) const;
  /// Puts zeros in place of what is left out. bias: may be undefined.
  void apply(torch::nn::Module& layer, at::Tensor& weight, at::Tensor& bias) const;
  /// Takes the mask or the scores away from the layer.
  void forget(torch::nn::Module& layer) const;
};

}  // namespace deeptide::compression
