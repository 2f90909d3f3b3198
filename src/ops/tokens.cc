// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parts of the tokens: drawn, gathered, scattered, and their masks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "deeptide/random_ltd.h"

// Shapes: B batch, S sequence, K tokens that are kept, D hidden, L layers.

namespace deeptide::ops {

using at::Tensor;

namespace {

/// Indices for gather and scatter along the tokens of (B, S, D) or (S, B, D).
Tensor spread(const Tensor& activations, const Tensor& indices, bool batch_first) {
  const Tensor index = batch_first ? indices.to(at::kLong) : indices.to(at::kLong).t();
  return index.unsqueeze(-1).expand({index.size(0), index.size(1), activations.size(-1)});
}

/// The dimensions of a mask that are of tokens: the last two, but not the first.
template <typename Cut>
Tensor each_token_dim(Tensor mask, int64_t length, Cut cut) {
  for (int64_t dim = std::max<int64_t>(mask.dim() - 2, 1); dim < mask.dim(); ++dim) {
    if (mask.size(dim) == length) mask = cut(mask, dim);
  }
  return mask;
}

}  // namespace

Tensor sample_tokens(int64_t kept, int64_t length, int64_t batch, int64_t layers, at::Device device) {
  const Tensor weights = at::ones({layers * batch, length}, at::TensorOptions(device));
  return std::get<0>(at::multinomial(weights, kept).view({layers, batch, kept}).sort(-1));
}

Tensor gather_tokens(const Tensor& activations, const Tensor& indices, bool batch_first) {
  return activations.gather(batch_first ? 1 : 0, spread(activations, indices, batch_first));
}

Tensor scatter_tokens(const Tensor& activations, const Tensor& part, const Tensor& indices, bool batch_first) {
  return activations.scatter(batch_first ? 1 : 0, spread(activations, indices, batch_first),
                             part.to(activations.scalar_type()));
}

Tensor choose_tokens(const Tensor& given, const Tensor& indices, int64_t dim) {
  auto target = given.sizes().vec();
  target[0] = indices.size(0);
  const Tensor whole = given.expand(target);
  std::vector<int64_t> shape(target.size(), 1);
  shape[0] = indices.size(0);
  shape[static_cast<size_t>(dim)] = target[static_cast<size_t>(dim)] = indices.size(1);
  return whole.gather(dim, indices.to(at::kLong).view(shape).expand(target));
}

Tensor cut_mask(const Tensor& mask, int64_t kept, int64_t length) {
  return each_token_dim(mask, length, [&](const Tensor& of, int64_t dim) { return of.narrow(dim, 0, kept); });
}

Tensor choose_mask(const Tensor& mask, const Tensor& indices, int64_t length) {
  return each_token_dim(mask, length, [&](const Tensor& of, int64_t dim) { return choose_tokens(of, indices, dim); });
}

Tensor mask_of_kept(const Tensor& mask, const Tensor& indices, int64_t length, bool is_encoder) {
  const int64_t batch = indices.size(0), kept = indices.size(1);
  TORCH_CHECK_VALUE(mask.dim() >= 2 && mask.size(-1) == length, "random-LTD: the mask has shape ", mask.sizes(),
                    ", expected two dimensions or more, the last of ", length, " tokens");
  const bool is_square = mask.dim() == 2 && mask.size(0) == length && length != batch;
  if (is_square && !is_encoder) return mask.narrow(0, 0, kept).narrow(1, 0, kept);
  TORCH_CHECK_VALUE(mask.size(0) == 1 || mask.size(0) == batch, "random-LTD: the mask has shape ", mask.sizes(),
                    ", expected ", batch, " rows or one, of ", length, " tokens");
  // Without padding, which belongs to a row, a causal mask depends on the order alone.
  if (mask.size(0) == 1 && batch != 1 && !is_encoder && mask.dim() > 2) return cut_mask(mask, kept, length);
  return choose_mask(mask, indices, length);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def("sample_tokens(int kept, int length, int batch, int layers, Device device) -> Tensor", sample_tokens);
  library.def("gather_tokens(Tensor activations, Tensor indices, bool batch_first=True) -> Tensor", gather_tokens);
  library.def("scatter_tokens(Tensor activations, Tensor part, Tensor indices, bool batch_first=True) -> Tensor",
              scatter_tokens);
  library.def("choose_tokens(Tensor whole, Tensor indices, int dim) -> Tensor", choose_tokens);
  library.def("cut_mask(Tensor mask, int kept, int length) -> Tensor", cut_mask);
  library.def("choose_mask(Tensor mask, Tensor indices, int length) -> Tensor", choose_mask);
  library.def("mask_of_kept(Tensor mask, Tensor indices, int length, bool is_encoder) -> Tensor", mask_of_kept);
}

}  // namespace deeptide::ops
