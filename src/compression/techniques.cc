// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Computes what each technique makes of a weight or an input, under DeepSpeed's names.
#include "compression/techniques.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>
#include <numeric>

#include "compression/layer.h"
#include "deeptide/compression.h"
#include "deeptide/quantize.h"

namespace deeptide {

using at::Tensor;

namespace compression {
namespace {

constexpr double kMomentum = 0.95;  // of the range of static calibration

struct Names {
  const char *technique, *mask, *scores;
};
constexpr Names kNames[] = {{"sparse_pruning", "sparse_pruning_mask", "sparse_mask_scores"},
                            {"row_pruning", "row_pruning_mask", "row_mask_scores"},
                            {"head_pruning", "head_pruning_mask", "head_pruning_scores"},
                            {"channel_pruning", "channel_pruning_mask", "channel_mask_scores"}};

Names names_of(const std::string& technique) {
  const Names* name = kNames;
  while (technique != name->technique) ++name;
  return *name;
}

/// The same on every rank, in every forward of a step, in a recomputation and after a resume.
Tensor noise_of(const WeightQuantization& how, const Tensor& weight) {
  at::Generator generator = at::globalContext().defaultGenerator(weight.device()).clone();
  generator.set_current_seed(static_cast<uint64_t>(how.draws * 1'000'003 + how.number));
  return at::empty({how.groups, weight.numel() / how.groups}, weight.options()).uniform_(-0.5, 0.5, generator);
}

/// One number for each output, to be multiplied with a weight: (N, 1, …).
std::vector<int64_t> one_per_output(const Tensor& weight) {
  std::vector<int64_t> shape(static_cast<size_t>(weight.dim()), 1);
  shape[0] = weight.size(0);
  return shape;
}

}  // namespace

Tensor WeightQuantization::values(const Tensor& weight) const {
  const at::NoGradGuard no_grad;
  std::optional<Tensor> noise;
  if (is_stochastic && bits > 2) noise = noise_of(*this, weight);
  const Tensor rounded = ops::quantize(weight.detach(), bits, groups, is_symmetric, noise);
  return share_kept == 0.0 ? rounded : weight.detach() * share_kept + rounded * (1 - share_kept);
}

bool Pruning::is_prepared(const torch::nn::Module& layer) const {
  const Names names = names_of(technique);
  return layer.named_buffers(/*recurse=*/false).contains(names.mask) ||
         layer.named_parameters(/*recurse=*/false).contains(names.scores);
}

void Pruning::prepare(torch::nn::Module& layer, const Tensor& weight) const {
  const Names names = names_of(technique);
  if (by_scores) {
    std::vector<int64_t> shape = one_per_output(weight);
    if (technique == "sparse_pruning") shape = weight.sizes().vec();
    if (technique == "head_pruning") shape = {1, heads};
    const Tensor scores = at::empty(shape, weight.options().requires_grad(false));
    torch::nn::init::kaiming_uniform_(scores, std::sqrt(5.0));
    layer.register_parameter(names.scores, scores);
    return;
  }
  const at::NoGradGuard no_grad;
  Tensor magnitude = weight.detach().abs();
  if (technique != "sparse_pruning") {
    std::vector<int64_t> dims(static_cast<size_t>(weight.dim() - 1));
    std::iota(dims.begin(), dims.end(), 1);
    magnitude = at::linalg_vector_norm(weight.detach(), 1, dims).view(one_per_output(weight));
  }
  layer.register_buffer(names.mask, ops::largest_mask(magnitude, share));
}

Tensor Pruning::mask(torch::nn::Module& layer) const {
  const Names names = names_of(technique);
  if (!by_scores) return layer.named_buffers(/*recurse=*/false)[names.mask];
  const Tensor scores = layer.named_parameters(/*recurse=*/false)[names.scores];
  Tensor kept;
  {
    const at::NoGradGuard no_grad;
    kept = ops::largest_mask(scores, share).to(scores.scalar_type());
  }
  return ops::straight_through(scores, kept);
}

void Pruning::apply(torch::nn::Module& layer, Tensor& weight, Tensor& bias) const {
  Tensor kept = mask(layer);
  if (technique == "head_pruning") kept = kept.repeat_interleave(weight.size(1) / heads, 1);
  if (bias.defined() && (technique == "row_pruning" || technique == "channel_pruning")) bias = bias * kept.view(-1);
  weight = weight * kept;
}

void Pruning::forget(torch::nn::Module& layer) const {
  const Names names = names_of(technique);
  if (by_scores) return erase_parameter(layer, names.scores);
  erase_buffer(layer, names.mask);
}

}  // namespace compression

ActivationRangeImpl::ActivationRangeImpl(const Tensor& like) {
  x_min_max = register_buffer("x_min_max", at::zeros({2}, like.options().requires_grad(false)));
}

std::pair<Tensor, Tensor> ActivationRangeImpl::forward(const Tensor& x) {
  if (is_training()) {
    const at::NoGradGuard no_grad;
    const Tensor seen = at::stack({x.min(), x.max()});
    const Tensor begins = x_min_max[0] == x_min_max[1];
    const Tensor before = at::where(begins, seen.to(x_min_max.scalar_type()), x_min_max);
    x_min_max.copy_(before * compression::kMomentum + seen * (1 - compression::kMomentum));
  }
  const Tensor range = x_min_max.to(x.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  return {range[0], range[1]};
}

Tensor InputQuantization::values(const Tensor& x, bool is_image) {
  const auto rounded = [&] {
    if (range) {
      const auto [low, high] = range(x);
      const at::NoGradGuard no_grad;
      return is_symmetric ? ops::quantize_symmetric(x, bits, 1, {}, at::maximum(low.abs(), high))
                          : ops::quantize_asymmetric(x, bits, 1, {}, low, high);
    }
    const at::NoGradGuard no_grad;
    const int64_t groups = is_image ? x.size(0) : x.numel() / std::max<int64_t>(x.size(-1), 1);
    return is_symmetric ? ops::quantize_symmetric(x, bits, groups) : ops::quantize_asymmetric(x, bits, groups);
  };
  return ops::straight_through(x, rounded());
}

}  // namespace deeptide
