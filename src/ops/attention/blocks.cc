// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attention span by span: scores of some rows of blocks are in memory at a time.
#include "ops/attention/blocks.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <limits>
#include <optional>
#include <utility>

namespace deeptide::ops {

using at::Tensor;

namespace {

// In bodies: P pairs of a sequence and a head, R rows of a span, C its columns.

/// Some pairs of one group, sequence by sequence: what their spans read, and where these put their results.
struct Pairs {
  const HeadGroup& group;
  const ScoreTerms& terms;
  Tensor query_PSD, key_PSD, value_PSD;
  int64_t first = 0;  // of the group's pairs
};

Tensor columns(const Tensor& tensor, int64_t dim, const Span& span) {
  if (span.columns.size() == 1) return tensor.narrow(dim, span.columns[0].begin, span.columns[0].count);
  std::vector<Tensor> parts;
  parts.reserve(span.columns.size());
  for (const Range& range : span.columns) parts.push_back(tensor.narrow(dim, range.begin, range.count));
  return at::cat(parts, dim);
}

Tensor rows(const Tensor& tensor, int64_t dim, const Span& span) {
  return tensor.narrow(dim, span.rows.begin, span.rows.count);
}

/// Adds (P, C, D) to the columns of (P, S, D).
void add_to_columns(const Tensor& total_PSD, const Span& span, const Tensor& part_PCD) {
  int64_t begin = 0;
  for (const Range& range : span.columns) {
    total_PSD.narrow(1, range.begin, range.count).add_(part_PCD.narrow(1, begin, range.count));
    begin += range.count;
  }
}

at::ScalarType score_type(const Tensor& query) { return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

/// (N, H, S, …) -> (pairs of the group, S, …), without a copy where the group has all heads.
Tensor pairs_of(const Tensor& tensor_NHS, const HeadGroup& group) {
  const bool all = static_cast<int64_t>(group.heads.size()) == tensor_NHS.size(1);
  const Tensor own =
      all ? tensor_NHS : tensor_NHS.index_select(1, at::tensor(group.heads, tensor_NHS.options().dtype(at::kLong)));
  return own.flatten(0, 1);
}

/// The terms (P, R, C) of relative positions for the pairs, read from a view that may repeat its elements.
Tensor relative_terms(const Pairs& pairs, const Span& span) {
  const Tensor part = columns(rows(pairs.terms.relative_position_NHSS, 2, span), 3, span);
  return pairs_of(part, pairs.group).narrow(0, pairs.first, pairs.query_PSD.size(0));
}

/// The terms (P, 1, C) of padded keys.
Tensor padding_terms(const Pairs& pairs, const Span& span) {
  const Tensor part_NC = columns(pairs.terms.key_padding_mask_NS, 1, span);
  const Tensor part_NHC = part_NC.unsqueeze(1).expand({-1, static_cast<int64_t>(pairs.group.heads.size()), -1});
  return part_NHC.flatten(0, 1).narrow(0, pairs.first, pairs.query_PSD.size(0)).unsqueeze(1);
}

/// True (R, C) where a column comes after its row; undefined where none does.
Tensor future(const Pairs& pairs, const Span& span) {
  const Range& last = span.columns.back();
  if (!pairs.terms.causal || last.begin + last.count <= span.rows.begin + 1) return {};
  const auto options = pairs.query_PSD.options().dtype(at::kLong);
  const Tensor position_S = at::arange(pairs.query_PSD.size(1), options);
  return columns(position_S, 0, span).unsqueeze(0) > rows(position_S, 0, span).unsqueeze(1);
}

/// The softmax (P, R, C) of a span's scores. A row whose scores are all masked gets zeros.
Tensor weights(const Pairs& pairs, const Span& span) {
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  const Tensor query_PRD = rows(pairs.query_PSD, 1, span), key_PCD = columns(pairs.key_PSD, 1, span);
  Tensor scores = at::bmm(query_PRD, key_PCD.transpose(1, 2)).to(score_type(query_PRD)) * pairs.terms.scale;
  const ScoreTerms& terms = pairs.terms;
  if (terms.relative_position_NHSS.defined()) scores = scores + relative_terms(pairs, span);
  if (terms.key_padding_mask_NS.defined()) scores = scores + padding_terms(pairs, span);
  if (terms.attention_mask_SS.defined()) scores = scores + columns(rows(terms.attention_mask_SS, 0, span), 1, span);
  if (const Tensor after = future(pairs, span); after.defined()) scores = scores.masked_fill(after, kMasked);
  const Tensor soft = at::softmax(scores, -1);
  if (!terms.key_padding_mask_NS.defined() && !terms.attention_mask_SS.defined()) return soft;
  return soft.masked_fill((scores == kMasked).all(-1, /*keepdim=*/true), 0.0);
}

/// Calls run(first, count) for all pairs of a group, in parts on the threads of a CPU where there are enough pairs: a
/// small product has no work for several threads. What records a graph, for a second derivative, stays on its thread.
void for_pairs(const Tensor& query_PSD, bool apart, const std::function<void(int64_t, int64_t)>& run) {
  const int64_t count = query_PSD.size(0);
  const bool on_threads = query_PSD.is_cpu() && apart && !at::GradMode::is_enabled() && count >= at::get_num_threads();
  if (!on_threads) return run(0, count);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below;
    run(begin, end - begin);
  });
}

Pairs some_pairs(const HeadGroup& group, const ScoreTerms& terms, const Tensor& query, const Tensor& key,
                 const Tensor& value, int64_t first, int64_t count) {
  return {group, terms, query.narrow(0, first, count), key.narrow(0, first, count), value.narrow(0, first, count),
          first};
}

/// Writes the pairs (P, S, D) of a group into (N, H, S, D).
void put_pairs(const Tensor& all_NHSD, const HeadGroup& group, const Tensor& own_PSD) {
  const auto num_heads = static_cast<int64_t>(group.heads.size());
  const Tensor own = own_PSD.unflatten(0, {all_NHSD.size(0), num_heads}).to(all_NHSD.scalar_type());
  if (num_heads == all_NHSD.size(1)) {
    all_NHSD.copy_(own);
  } else {
    all_NHSD.index_copy_(1, at::tensor(group.heads, all_NHSD.options().dtype(at::kLong)), own);
  }
}

/// Sums the gradient (P, R, C) of a span's terms over what the relative positions (N or 1, H or 1, S, S) repeat.
void add_to_relative(const Tensor& total, const Pairs& pairs, const Span& span, const Tensor& gradient_PRC) {
  const auto num_heads = static_cast<int64_t>(pairs.group.heads.size());
  Tensor own = gradient_PRC.unflatten(0, {gradient_PRC.size(0) / num_heads, num_heads});
  if (total.size(0) == 1) own = own.sum(0, /*keepdim=*/true);
  if (total.size(1) == 1) own = own.sum(1, /*keepdim=*/true);
  int64_t begin = 0;
  for (const Range& range : span.columns) {
    const Tensor target = rows(total, 2, span).narrow(3, range.begin, range.count);
    const Tensor part = own.narrow(3, begin, range.count).to(total.scalar_type());
    if (total.size(1) == 1 || num_heads == total.size(1)) {
      target.add_(part);
    } else {
      target.index_add_(1, at::tensor(pairs.group.heads, total.options().dtype(at::kLong)), part);
    }
    begin += range.count;
  }
}

struct PairGradients {
  Tensor query_PSD, key_PSD, value_PSD;
};

void backward_of(const Pairs& pairs, const Tensor& gradient_PSD, const PairGradients& into, const Tensor& relative) {
  const auto type = pairs.query_PSD.scalar_type();
  for (const Span& span : pairs.group.spans) {
    const Tensor weights_PRC = weights(pairs, span);
    const Tensor gradient_PRD = rows(gradient_PSD, 1, span), value_PCD = columns(pairs.value_PSD, 1, span);
    add_to_columns(into.value_PSD, span, at::bmm(weights_PRC.to(type).transpose(1, 2), gradient_PRD));
    const Tensor of_weights = at::bmm(gradient_PRD, value_PCD.transpose(1, 2)).to(weights_PRC.scalar_type());
    const Tensor of_scores = at::_softmax_backward_data(of_weights, weights_PRC, -1, weights_PRC.scalar_type());
    if (relative.defined()) add_to_relative(relative, pairs, span, of_scores);
    const Tensor of_products = (of_scores * pairs.terms.scale).to(type);
    rows(into.query_PSD, 1, span).copy_(at::bmm(of_products, columns(pairs.key_PSD, 1, span)));
    add_to_columns(into.key_PSD, span, at::bmm(of_products.transpose(1, 2), rows(pairs.query_PSD, 1, span)));
  }
}

}  // namespace

Tensor attend(const Tensor& query_NHSD, const Tensor& key_NHSD, const Tensor& value_NHSD,
              const std::vector<HeadGroup>& groups, const ScoreTerms& terms) {
  const Tensor result = at::zeros(query_NHSD.sizes(), query_NHSD.options());
  for (const HeadGroup& group : groups) {
    const Tensor query = pairs_of(query_NHSD, group), key = pairs_of(key_NHSD, group),
                 value = pairs_of(value_NHSD, group);
    const Tensor own = at::zeros(query.sizes(), query.options());
    for_pairs(query, /*apart=*/true, [&](int64_t first, int64_t count) {
      const Pairs pairs = some_pairs(group, terms, query, key, value, first, count);
      const Tensor part = own.narrow(0, first, count);
      for (const Span& span : group.spans) {
        const Tensor weights_PRC = weights(pairs, span).to(query.scalar_type());
        rows(part, 1, span).copy_(at::bmm(weights_PRC, columns(pairs.value_PSD, 1, span)));
      }
    });
    put_pairs(result, group, own);
  }
  return result;
}

AttentionGradients attend_backward(const Tensor& gradient_NHSD, const Tensor& query_NHSD, const Tensor& key_NHSD,
                                   const Tensor& value_NHSD, const std::vector<HeadGroup>& groups,
                                   const ScoreTerms& terms, const Tensor& relative_position) {
  AttentionGradients results{at::zeros_like(query_NHSD), at::zeros_like(key_NHSD), at::zeros_like(value_NHSD), {}};
  if (relative_position.defined()) results.relative_position = at::zeros_like(relative_position);
  for (const HeadGroup& group : groups) {
    const Tensor query = pairs_of(query_NHSD, group), key = pairs_of(key_NHSD, group),
                 value = pairs_of(value_NHSD, group), gradient = pairs_of(gradient_NHSD, group);
    // Several rows add to one column: in the type of scores.
    const auto sums = query.options().dtype(score_type(query));
    const PairGradients own{at::zeros(query.sizes(), query.options()), at::zeros(key.sizes(), sums),
                            at::zeros(value.sizes(), sums)};
    // Relative positions that repeat add up what several pairs give.
    for_pairs(query, /*apart=*/!relative_position.defined(), [&](int64_t first, int64_t count) {
      const PairGradients into{own.query_PSD.narrow(0, first, count), own.key_PSD.narrow(0, first, count),
                               own.value_PSD.narrow(0, first, count)};
      backward_of(some_pairs(group, terms, query, key, value, first, count), gradient.narrow(0, first, count), into,
                  results.relative_position);
    });
    put_pairs(results.query, group, own.query_PSD);
    put_pairs(results.key, group, own.key_PSD);
    put_pairs(results.value, group, own.value_PSD);
  }
  return results;
}

}  // namespace deeptide::ops
