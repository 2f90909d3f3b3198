// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layers whose weights neighbouring ranks share: each is torch's layer of its name, on all ranks together.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deeptide/tensor_team.h"

namespace deeptide {

using TensorTeamPtr = std::shared_ptr<TensorTeam>;

/// Passes an activation that all ranks have alike into layers that they share: its gradient is the sum of the ranks'
/// gradients. Layers that take one activation are given one result, and `project` it: queries, keys and values have one
/// sum then. It travels while the gradients of their weights are computed. Collective in backward. Shapes: any.
DEEPTIDE_API at::Tensor enter_team(const at::Tensor& x, const TensorTeamPtr& team);
/// The sum of what the ranks have, whose gradient is each rank's: what they share becomes what all have alike.
DEEPTIDE_API at::Tensor leave_team(const at::Tensor& x, const TensorTeamPtr& team);

/// A layer of which each rank of a team has a slice, made of the whole one. Construction is collective: the first
/// rank's values count.
class DEEPTIDE_API SharedLayer {
 public:
  virtual ~SharedLayer() = default;
  /// Names its parameters that are cut, as they are called in the layer.
  const std::vector<TensorSlice>& slices() const { return slices_; }

 protected:
  explicit SharedLayer(TensorTeamPtr team) : team_(std::move(team)) {}
  /// Gives the ranks one value; leaves each its slice along `dim`, padded with zeros.
  at::Tensor cut(const char* name, const at::Tensor& whole, int64_t dim, std::vector<int64_t> blocks);

  TensorTeamPtr team_;

 private:
  std::vector<TensorSlice> slices_;
};

/// The slices of a model that holds such layers, for tensor_axes.
DEEPTIDE_API std::vector<TensorSlice> tensor_slices(const torch::nn::Module& model);

struct ColumnParallelOptions {
  bool gather_output = false;  // every rank returns all outputs
  /// Sizes of what is fused in the outputs and cut by itself, such as queries, keys and values. Empty: all in one.
  std::vector<int64_t> blocks;
};

/// A linear layer of whose outputs each rank computes a part. Shapes: (*, in) -> (*, out / ranks), or (*, out) with
/// gather_output. Sizes that do not divide are padded with zeros, which stay zero.
class DEEPTIDE_API ColumnParallelLinearImpl : public torch::nn::Module, public SharedLayer {
 public:
  /// Errors: ValueError if the blocks do not add up to the outputs.
  ColumnParallelLinearImpl(const torch::nn::Linear& whole, const TensorTeamPtr& team,
                           ColumnParallelOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  /// The same for what enter_team returned.
  at::Tensor project(const at::Tensor& entered);

  at::Tensor weight, bias;  // bias: undefined without one

 private:
  ColumnParallelOptions options_;
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelOptions {
  bool split_input = false;  // every rank is given all inputs
  std::vector<int64_t> blocks;
};

/// A linear layer of whose inputs each rank has a part. Shapes: (*, in / ranks), or (*, in) with split_input, to (*,
/// out). The bias is whole on each rank.
class DEEPTIDE_API RowParallelLinearImpl : public torch::nn::Module, public SharedLayer {
 public:
  /// Errors: ValueError if the blocks do not add up to the inputs.
  RowParallelLinearImpl(const torch::nn::Linear& whole, const TensorTeamPtr& team, RowParallelOptions options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  at::Tensor own_features(const at::Tensor& x) const;

  RowParallelOptions options_;
};
TORCH_MODULE(RowParallelLinear);

/// An embedding of whose words each rank has a part. Shapes: (*) int64 -> (*, width).
class DEEPTIDE_API VocabParallelEmbeddingImpl : public torch::nn::Module, public SharedLayer {
 public:
  /// Errors: ValueError for an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse.
  VocabParallelEmbeddingImpl(const torch::nn::Embedding& whole, const TensorTeamPtr& team);
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor weight;
};
TORCH_MODULE(VocabParallelEmbedding);

struct VocabParallelLossOptions {
  std::optional<int64_t> vocabulary;  // where it does not divide among the ranks
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;  // over labels that are not ignored
};

/// torch's cross_entropy from a column-parallel head's own logits, in fp32: no rank has those of all words. Shapes:
/// logits (*, V / ranks), labels (*) int64 -> (), or (*) without a reduction. Collective.
DEEPTIDE_API at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                                     const TensorTeamPtr& team,
                                                     const VocabParallelLossOptions& options = {});

}  // namespace deeptide
