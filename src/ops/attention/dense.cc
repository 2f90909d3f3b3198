// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attention over short sequences in bf16: products of some heads at a time, whose scores stay in the cache.
#include "ops/attention/dense.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "deeptide/ops.h"
#include "ops/dispatched.h"
#include "ops/fast_path.h"

// Shapes: N sequences, H heads, P pairs of both, R queries, C keys, D elements of a head.

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<Tensor>;

namespace {

constexpr int64_t kScoresAtOnce = int64_t{1} << 18;  // in memory at a time: 512 KiB, part of the second-level cache
constexpr int64_t kMostKeys = 1024;                  // beyond, torch's kernel is as fast

Tensor pairs(const Tensor& tensor_NHSD) { return tensor_NHSD.reshape({-1, tensor_NHSD.size(2), tensor_NHSD.size(3)}); }

/// Memory for the scores of some pairs, `most` scores or one pair's.
Tensor room_for(const Tensor& query_PRD, const Tensor& key_PCD, int64_t most) {
  const int64_t rows = query_PRD.size(1), columns = key_PCD.size(1);
  return at::empty({std::clamp<int64_t>(most / (rows * columns), 1, query_PRD.size(0)), rows, columns},
                   query_PRD.options());
}

/// Calls work(first, count) for as many pairs at a time as there is room for.
template <typename Work>
void for_some_pairs(int64_t pairs, const Tensor& room, Work work) {
  for (int64_t first = 0; first < pairs; first += room.size(0)) work(first, std::min(room.size(0), pairs - first));
}

/// The shares of some pairs' queries, written to `into`.
Tensor shares_of(const Tensor& query_PRD, const Tensor& key_PCD, const AttentionTerms& terms, int64_t first,
                 int64_t count, const Tensor& into) {
  Tensor scores_PRC = into.narrow(0, 0, count);
  at::bmm_out(scores_PRC, query_PRD.narrow(0, first, count), key_PCD.narrow(0, first, count).transpose(1, 2));
  attention_shares_cpu(scores_PRC, terms, first);
  return scores_PRC;
}

struct Attention : torch::autograd::Function<Attention> {
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                        const AttentionTerms& terms) {
    context->save_for_backward({query, key, value, terms.mask_NHRC});
    context->saved_data["scale"] = terms.scale;
    context->saved_data["causal"] = terms.causal;
    const at::AutoDispatchBelowADInplaceOrView below;
    return attend(query, key, value, terms);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) return variable_list(4);
    const auto saved = context->get_saved_variables();
    const AttentionTerms terms{context->saved_data["scale"].toDouble(), context->saved_data["causal"].toBool(),
                               saved[3]};
    const bool ours = !at::GradMode::is_enabled() && fast_path(gradients[0]);
    const auto found = ours ? attend_backward(gradients[0], saved[0], saved[1], saved[2], terms)
                            : attend_backward_reference(gradients[0], saved[0], saved[1], saved[2], terms);
    return {found[0], found[1], found[2], Tensor()};
  }
};

/// Whether bf16 products are instructions of this processor. Elsewhere they are made of fp32 ones, as torch's kernel
/// is.
bool multiplies_bf16() {
#if defined(__x86_64__)
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
#else
  return false;
#endif
}

bool fits(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask) {
  const auto is_ours = [](const Tensor& tensor) {
    return tensor.dim() == 4 && tensor.numel() > 0 && fast_path(tensor) && tensor.scalar_type() == at::kBFloat16;
  };
  if (!is_ours(query) || !is_ours(key) || !is_ours(value) || key.sizes() != value.sizes()) return false;
  if (query.size(0) != key.size(0) || query.size(1) != key.size(1) || query.size(3) != key.size(3)) return false;
  if (key.size(2) > kMostKeys) return false;
  if (!mask) return true;
  const bool is_mask = mask->scalar_type() == at::kBool || mask->is_floating_point();
  return readable(*mask) && is_mask && !mask->requires_grad() && mask->dim() >= 2 && mask->dim() <= 4 &&
         at::is_expandable_to(mask->sizes(), {query.size(0), query.size(1), query.size(2), key.size(2)});
}

/// The mask as what is added to scores: fp32, its rows contiguous.
Tensor added(const Tensor& mask, const Tensor& query, const Tensor& key) {
  Tensor mask_4d = mask;
  while (mask_4d.dim() < 4) mask_4d = mask_4d.unsqueeze(0);
  const Tensor terms = mask.scalar_type() == at::kBool
                           ? at::zeros(mask_4d.sizes(), query.options().dtype(at::kFloat))
                                 .masked_fill_(mask_4d.logical_not(), -std::numeric_limits<double>::infinity())
                           : mask_4d.to(at::kFloat);
  const int64_t columns = key.size(2);
  const Tensor rows = terms.expand({terms.size(0), terms.size(1), terms.size(2), columns}).contiguous();
  return rows.expand({query.size(0), query.size(1), query.size(2), columns});
}

}  // namespace

Tensor attend(const Tensor& query_NHRD, const Tensor& key_NHCD, const Tensor& value_NHCD, const AttentionTerms& terms) {
  const Tensor query = pairs(query_NHRD), key = pairs(key_NHCD), value = pairs(value_NHCD);
  const Tensor result = at::empty(query.sizes(), query.options()), room = room_for(query, key, kScoresAtOnce);
  for_some_pairs(query.size(0), room, [&](int64_t first, int64_t count) {
    Tensor part = result.narrow(0, first, count);
    at::bmm_out(part, shares_of(query, key, terms, first, count, room), value.narrow(0, first, count));
  });
  // In memory as (N, R, H, D), which the next layer reads as one row per query.
  const Tensor by_query =
      at::empty({query_NHRD.size(0), query_NHRD.size(2), query_NHRD.size(1), query_NHRD.size(3)}, query_NHRD.options());
  return by_query.transpose(1, 2).copy_(result.view(query_NHRD.sizes()));
}

std::array<Tensor, 3> attend_backward(const Tensor& gradient_NHRD, const Tensor& query_NHRD, const Tensor& key_NHCD,
                                      const Tensor& value_NHCD, const AttentionTerms& terms) {
  const Tensor gradient = pairs(gradient_NHRD), query = pairs(query_NHRD), key = pairs(key_NHCD),
               value = pairs(value_NHCD);
  const Tensor of_query = at::empty(query.sizes(), query.options()), of_key = at::empty(key.sizes(), key.options()),
               of_value = at::empty(key.sizes(), key.options());
  const Tensor room = room_for(query, key, kScoresAtOnce / 2), other_room = at::empty_like(room);
  for_some_pairs(query.size(0), room, [&](int64_t first, int64_t count) {
    const auto some = [&](const Tensor& tensor) { return tensor.narrow(0, first, count); };
    Tensor query_part = some(of_query), key_part = some(of_key), value_part = some(of_value);
    const Tensor shares_PRC = shares_of(query, key, terms, first, count, room);
    at::bmm_out(value_part, shares_PRC.transpose(1, 2), some(gradient));
    Tensor scores_PRC = other_room.narrow(0, 0, count);
    at::bmm_out(scores_PRC, some(gradient), some(value).transpose(1, 2));
    attention_gradient_cpu(shares_PRC, scores_PRC, terms.scale);
    at::bmm_out(query_part, scores_PRC, some(key));
    at::bmm_out(key_part, scores_PRC.transpose(1, 2), some(query));
  });
  return {of_query.view(query_NHRD.sizes()), of_key.view(key_NHCD.sizes()), of_value.view(key_NHCD.sizes())};
}

std::array<Tensor, 3> attend_backward_reference(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                const Tensor& value, const AttentionTerms& terms) {
  Tensor scores = at::matmul(query, key.transpose(2, 3)) * terms.scale;
  if (terms.mask_NHRC.defined()) scores = scores + terms.mask_NHRC;
  if (terms.causal)
    scores = scores.masked_fill(at::ones_like(scores, at::kBool).triu(1), -std::numeric_limits<double>::infinity());
  const Tensor shares = at::softmax(scores, -1, at::kFloat).to(query.scalar_type());
  const Tensor of_shares = at::matmul(gradient, value.transpose(2, 3));
  const Tensor of_scores = shares * (of_shares - (shares * of_shares).sum(-1, /*keepdim=*/true)) * terms.scale;
  return {at::matmul(of_scores, key), at::matmul(of_scores.transpose(2, 3), query),
          at::matmul(shares.transpose(2, 3), gradient)};
}

namespace {

/// torch's kernel, and its errors. Of a row it keeps the logarithm of the sum for backward. Where the mask adds large
/// numbers to all keys of a row, as torch.finfo(dtype).min to padding's, the count of keys is lost in that logarithm on
/// a CPU, and gradients are too large by it. So such a row is shifted to begin at 0, which changes no softmax; where
/// the numbers were so large that scores vanished beside them, scores are 0.
Tensor attention_of_torch(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                          bool causal, std::optional<double> scale) {
  if (!mask || !query.is_cpu() || !mask->is_floating_point() || mask->numel() == 0 || mask->dim() < 2) {
    return at::scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale);
  }
  constexpr double kLarge = -1e4, kBeyondScores = -1e30, kLowestHalf = -6e4;
  const double beyond = mask->scalar_type() == at::kHalf ? kLowestHalf : kBeyondScores;
  const Tensor most = mask->detach().amax(-1, /*keepdim=*/true);
  const Tensor finite = most > -std::numeric_limits<double>::infinity();
  const Tensor shift = most.masked_fill((most > kLarge).logical_or_(finite.logical_not()), 0.0);
  const Tensor vanished = (most < beyond).logical_and_(finite);
  return at::scaled_dot_product_attention(query.masked_fill(vanished, 0.0), key, value, *mask - shift, 0.0, causal,
                                          scale);
}

}  // namespace

Tensor attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                        bool causal, std::optional<double> scale) {
  const OptionalTensor given = mask && mask->defined() ? mask : std::nullopt;
  const bool ours = multiplies_bf16() && !(given && causal) && fits(query, key, value, given);
  if (!ours) return attention_of_torch(query, key, value, given, causal, scale);
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  return Attention::apply(query, key, value,
                          AttentionTerms{factor, causal, given ? added(*given, query, key) : Tensor()});
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, bool causal,
                 std::optional<double> scale) {
  static const auto op = dispatched<decltype(attention_kernel)>("deeptide::attention");
  return op.call(query, key, value, mask, causal, scale);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool causal=False, float? scale=None) "
      "-> Tensor",
      attention_kernel);
}

}  // namespace deeptide::ops
