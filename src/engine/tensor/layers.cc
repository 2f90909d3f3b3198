// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Torch's layers on slices of their weights, with exchanges before or behind.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "deeptide/tensor_layers.h"
#include "engine/tensor/entry.h"
#include "engine/tensor/with_backward.h"
#include "sharding/tensor_slices.h"

namespace deeptide {

using at::Tensor;
using engine::with_backward;

namespace {

std::vector<int64_t> checked(std::vector<int64_t> blocks, int64_t features) {
  if (blocks.empty()) return {features};
  TORCH_CHECK_VALUE(std::accumulate(blocks.begin(), blocks.end(), int64_t{0}) == features &&
                        *std::min_element(blocks.begin(), blocks.end()) > 0,
                    "blocks ", blocks, " of a layer of ", features, " features: expected sizes that add up to them");
  return blocks;
}

TensorSlice features_of(const Tensor& x, std::vector<int64_t> blocks) {
  return {.name = "features", .dim = x.dim() - 1, .blocks = std::move(blocks)};
}

}  // namespace

Tensor leave_team(const Tensor& x, const TensorTeamPtr& team) {
  return with_backward(
      x, [team](const Tensor& part) { return team->all_reduce(part, "forward"); },
      [](const Tensor& gradient) { return gradient; });
}

Tensor SharedLayer::cut(const char* name, const Tensor& whole, int64_t dim, std::vector<int64_t> blocks) {
  const at::NoGradGuard no_grad;
  const Tensor values = whole.detach().clone();
  team_->broadcast(values, "start");
  slices_.push_back({.name = name, .dim = dim, .blocks = std::move(blocks)});
  return sharding::cut(slices_.back(), values, team_->size(), team_->index());
}

std::vector<TensorSlice> tensor_slices(const torch::nn::Module& model) {
  std::vector<TensorSlice> found;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const auto* const layer = dynamic_cast<const SharedLayer*>(item.value().get());
    if (layer == nullptr) continue;
    for (TensorSlice slice : layer->slices()) {
      if (!item.key().empty()) slice.name = item.key() + "." + slice.name;
      found.push_back(std::move(slice));
    }
  }
  return found;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const torch::nn::Linear& whole, const TensorTeamPtr& team,
                                                   ColumnParallelOptions options)
    : SharedLayer(team), options_(std::move(options)) {
  options_.blocks = checked(std::move(options_.blocks), whole->weight.size(0));
  weight = register_parameter("weight", cut("weight", whole->weight, 0, options_.blocks));
  if (whole->bias.defined()) bias = register_parameter("bias", cut("bias", whole->bias, 0, options_.blocks));
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& x) { return project(enter_team(x, team_)); }

Tensor ColumnParallelLinearImpl::project(const Tensor& entered) {
  const Tensor output = engine::product_of(entered, weight, bias);
  if (!options_.gather_output) return output;
  const TensorSlice slice = features_of(output, options_.blocks);
  return with_backward(
      output, [&](const Tensor& own) { return sharding::joined(slice, team_->all_gather(own, "forward")); },
      [slice, team = team_](const Tensor& gradient) {
        return sharding::cut(slice, gradient, team->size(), team->index());
      });
}

RowParallelLinearImpl::RowParallelLinearImpl(const torch::nn::Linear& whole, const TensorTeamPtr& team,
                                             RowParallelOptions options)
    : SharedLayer(team), options_(std::move(options)) {
  options_.blocks = checked(std::move(options_.blocks), whole->weight.size(1));
  weight = register_parameter("weight", cut("weight", whole->weight, 1, options_.blocks));
  if (!whole->bias.defined()) return;
  const Tensor values = whole->bias.detach().clone();
  team->broadcast(values, "start");
  bias = register_parameter("bias", values);
}

Tensor RowParallelLinearImpl::forward(const Tensor& x) {
  const Tensor part = options_.split_input ? own_features(x) : x;
  const Tensor sum = leave_team(at::linear(part, weight), team_);
  return bias.defined() ? sum + bias : sum;
}

Tensor RowParallelLinearImpl::own_features(const Tensor& x) const {
  const TensorSlice slice = features_of(x, options_.blocks);
  return with_backward(
      x, [&](const Tensor& whole) { return sharding::cut(slice, whole, team_->size(), team_->index()); },
      [slice, team = team_](const Tensor& gradient) {
        return sharding::joined(slice, team->all_gather(gradient, "backward"));
      });
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(const torch::nn::Embedding& whole, const TensorTeamPtr& team)
    : SharedLayer(team) {
  const torch::nn::EmbeddingOptions& options = whole->options;
  TORCH_CHECK_VALUE(
      !options.padding_idx() && !options.max_norm() && !options.scale_grad_by_freq() && !options.sparse(),
      "an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse cannot be cut among ranks; leave it out");
  weight = register_parameter("weight", cut("weight", whole->weight, 0, {whole->weight.size(0)}));
}

Tensor VocabParallelEmbeddingImpl::forward(const Tensor& tokens) {
  const int64_t part = weight.size(0);
  const Tensor local = tokens - team_->index() * part;
  const Tensor elsewhere = local.lt(0).logical_or(local.ge(part));
  const Tensor vectors = at::embedding(weight, local.masked_fill(elsewhere, 0));
  return leave_team(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), team_);
}

}  // namespace deeptide
