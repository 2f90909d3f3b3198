// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The largest eigenvalue of each block's Hessian: blocks with small ones bear fewer bits sooner.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "compression/section.h"
#include "deeptide/compression.h"

namespace deeptide::compression {

/// The eigenvalues that "quantize_training" asks for, and what follows from them. Source: Dong et al., HAWQ,
/// arXiv:1905.03696.
class Curvature {
 public:
  /// `section`: "quantize_training.eigenvalue". Errors: ConfigError where the model has no such blocks.
  Curvature(const Json& section, const torch::nn::Module& model);

  /// The largest eigenvalue of each block, of a loss before its backward, which can still run. 0: the loss is linear in
  /// it.
  std::vector<double> eigenvalues(const at::Tensor& loss) const;
  /// Measures at a step's last loss. `step`: how many were applied. `mean`: over ranks. Errors: ConfigError where an
  /// operator of the model has no second derivative.
  void measure(int64_t step, const at::Tensor& loss, const std::function<double(double)>& mean);
  /// Multiplies the next period of the layer's bits besides doubling it, from 1 to 5, by what was measured since
  /// `forget`.
  int64_t factor(const torch::nn::Module& layer) const;
  void forget() { factors_.clear(); }

 private:
  PowerIteration iteration_;
  int64_t every_ = 1;  // steps
  bool is_verbose_ = false;
  std::vector<std::shared_ptr<torch::nn::Module>> blocks_;
  std::map<const torch::nn::Module*, size_t> block_of_;
  std::vector<int64_t> factors_;  // of blocks; empty: nothing was measured
};

}  // namespace deeptide::compression
