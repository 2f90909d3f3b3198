// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounding in torch's operators, in the order that gives DeepSpeed's values.
#include "deeptide/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>

namespace deeptide::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

struct StraightThrough : torch::autograd::Function<StraightThrough> {
  static Tensor forward(torch::autograd::AutogradContext* /*context*/, const Tensor& /*source*/, const Tensor& value) {
    return value.view_as(value);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], Tensor()};
  }
};

Tensor in_groups(const Tensor& x, int64_t groups) { return x.reshape({groups, -1}); }

Tensor rounded(const Tensor& steps, const OptionalTensor& noise, int64_t lowest, int64_t highest) {
  return (noise ? steps + *noise : steps).round().clamp(lowest, highest);
}

Tensor sums_of_magnitudes(const Tensor& flat) { return at::norm(flat, 1, {1}, /*keepdim=*/true); }

/// -a, 0 or a: 0 up to 0.7 of the group's mean magnitude, a the mean magnitude above.
Tensor quantize_ternary(const Tensor& x, int64_t groups) {
  const Tensor flat = in_groups(x, groups), threshold = sums_of_magnitudes(flat).div(flat.size(1)) * 0.7;
  const Tensor large = (flat.abs() > threshold).to(x.scalar_type()), count = large.sum(1);
  const Tensor alpha = ((large * flat).abs().sum(1) / at::where(count == 0, at::ones_like(count), count)).view({-1, 1});
  return (alpha * (flat > threshold).to(x.scalar_type()) - alpha * (flat < -threshold).to(x.scalar_type()))
      .reshape(x.sizes());
}

/// The sign times the group's mean magnitude.
Tensor quantize_binary(const Tensor& x, int64_t groups) {
  const Tensor flat = in_groups(x, groups);
  return flat.sign().mul(sums_of_magnitudes(flat).div(flat.size(1))).reshape(x.sizes());
}

}  // namespace

Tensor straight_through(const Tensor& source, const Tensor& value) { return StraightThrough::apply(source, value); }

Tensor quantize_symmetric(const Tensor& x, int64_t bits, int64_t groups, const OptionalTensor& noise,
                          const OptionalTensor& bound) {
  const int64_t levels = int64_t{1} << bits;
  const Tensor flat = in_groups(x, groups);
  Tensor scale = (bound ? *bound : flat.abs().amax({-1}, /*keepdim=*/true)) * 2 / levels;
  scale = at::where(scale == 0, at::ones_like(scale), scale);
  return (rounded(flat / scale, noise, -(levels / 2), levels / 2 - 1) * scale).reshape(x.sizes());
}

Tensor quantize_asymmetric(const Tensor& x, int64_t bits, int64_t groups, const OptionalTensor& noise,
                           const OptionalTensor& lowest, const OptionalTensor& highest) {
  const int64_t levels = int64_t{1} << bits;
  const Tensor flat = in_groups(x, groups);
  const Tensor low = lowest ? *lowest : flat.amin({-1}, /*keepdim=*/true);
  const Tensor high = highest ? *highest : flat.amax({-1}, /*keepdim=*/true);
  Tensor scale = (high - low) / levels;
  const Tensor magnitude = low.abs();  // of equal values: one step of their own size reaches them
  scale = at::where(scale == 0, at::where(magnitude == 0, at::ones_like(scale), magnitude), scale);
  const Tensor zero_point = (low / scale).round() * scale;
  return (rounded((flat - zero_point) / scale, noise, 0, levels - 1) * scale + zero_point).reshape(x.sizes());
}

Tensor quantize(const Tensor& x, int64_t bits, int64_t groups, bool is_symmetric, const OptionalTensor& noise) {
  if (bits == 1) return quantize_binary(x, groups);
  if (bits == 2) return quantize_ternary(x, groups);
  return is_symmetric ? quantize_symmetric(x, bits, groups, noise) : quantize_asymmetric(x, bits, groups, noise);
}

Tensor largest_mask(const Tensor& scores, double share) {
  const Tensor order = std::get<1>(scores.detach().flatten().sort(/*dim=*/-1, /*descending=*/true));
  const auto count = static_cast<int64_t>(std::ceil(share * static_cast<double>(scores.numel())));
  Tensor mask = at::zeros({scores.numel()}, scores.options().dtype(at::kBool));
  return mask.index_fill_(0, order.narrow(0, 0, count), 1).view(scores.sizes());
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def("straight_through(Tensor source, Tensor value) -> Tensor", straight_through);
  library.def("quantize_symmetric(Tensor x, int bits, int groups=1, Tensor? noise=None, Tensor? bound=None) -> Tensor",
              quantize_symmetric);
  library.def(
      "quantize_asymmetric(Tensor x, int bits, int groups=1, Tensor? noise=None, Tensor? low=None, Tensor? high=None) "
      "-> Tensor",
      quantize_asymmetric);
  library.def("quantize(Tensor x, int bits, int groups=1, bool is_symmetric=True, Tensor? noise=None) -> Tensor",
              quantize);
  library.def("largest_mask(Tensor scores, float share) -> Tensor", largest_mask);
}

}  // namespace deeptide::ops
