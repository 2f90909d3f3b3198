// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The operator of block-sparse attention: what it takes, and its gradient.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string>

#include "deeptide/sparse_attention.h"
#include "ops/attention/blocks.h"
#include "ops/attention/spans.h"
#include "ops/dispatched.h"

// Shapes: N sequences, H heads, S positions, D elements of a head.

namespace deeptide::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<Tensor>;

namespace {

/// Scores of a span that are in memory at a time: 1 MiB in fp32, which the second-level cache holds.
constexpr int64_t kMostScores = int64_t{1} << 18;

struct Masks {
  OptionalTensor key_padding_NS, attention_SS;
  bool multiply_key_padding = false, multiply_attention = true;
};

/// A mask as a term of the scores.
Tensor term_of(const OptionalTensor& mask, bool multiply, const Tensor& query) {
  if (!mask || !mask->defined()) return {};
  const auto type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor given = mask->detach();
  if (!multiply) return given.to(type);
  return at::zeros_like(given, given.options().dtype(type))
      .masked_fill_(given == 0, -std::numeric_limits<double>::infinity());
}

Tensor expanded(const OptionalTensor& relative, const Tensor& query) {
  if (!relative || !relative->defined()) return {};
  const auto type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return relative->to(type).expand({query.size(0), query.size(1), query.size(2), query.size(2)});
}

/// Prepends dimensions of size 1.
OptionalTensor in_four_dimensions(const OptionalTensor& relative) {
  if (!relative || !relative->defined()) return std::nullopt;
  Tensor result = *relative;
  while (result.dim() < 4) result = result.unsqueeze(0);
  return result;
}

struct SparseAttention : torch::autograd::Function<SparseAttention> {
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& relative_position, const Tensor& layout, int64_t block, double scale,
                        bool causal, const Masks& masks) {
    const Tensor padding = term_of(masks.key_padding_NS, masks.multiply_key_padding, query);
    const Tensor attention = term_of(masks.attention_SS, masks.multiply_attention, query);
    context->save_for_backward({query, key, value, relative_position.value_or(Tensor()), layout, padding, attention});
    context->saved_data["block"] = block;
    context->saved_data["scale"] = scale;
    context->saved_data["causal"] = causal;
    const ScoreTerms terms{scale, causal, expanded(relative_position, query), padding, attention};
    return attend(query, key, value, head_groups(layout, block, causal, kMostScores), terms);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list results(9);
    if (!gradients[0].defined()) return results;
    const auto saved = context->get_saved_variables();
    const Tensor &query = saved[0], &relative = saved[3];
    const auto as_optional = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    const bool causal = context->saved_data["causal"].toBool();
    const ScoreTerms terms{context->saved_data["scale"].toDouble(), causal, expanded(as_optional(relative), query),
                           saved[5], saved[6]};
    const auto groups = head_groups(saved[4], context->saved_data["block"].toInt(), causal, kMostScores);
    const auto found = attend_backward(gradients[0], query, saved[1], saved[2], groups, terms,
                                       context->needs_input_grad(3) ? relative : Tensor());
    results[0] = found.query;
    results[1] = found.key;
    results[2] = found.value;
    results[3] = found.relative_position;
    return results;
  }
};

std::string sizes_of(const Tensor& tensor) {
  std::string text = "(";
  for (const int64_t size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

void check_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  TORCH_CHECK_VALUE(query.dim() == 4 && query.sizes() == key.sizes() && query.sizes() == value.sizes(),
                    "query, key and value are ", sizes_of(query), ", ", sizes_of(key), " and ", sizes_of(value),
                    ", expected one size (N, H, S, D): sparse attention is self-attention");
  TORCH_CHECK_VALUE(at::isFloatingType(query.scalar_type()) && query.scalar_type() == key.scalar_type() &&
                        query.scalar_type() == value.scalar_type(),
                    "query, key and value have types ", query.scalar_type(), ", ", key.scalar_type(), " and ",
                    value.scalar_type(), ", expected one floating type");
}

void check_layout(const Tensor& layout, int64_t block, const Tensor& query) {
  const int64_t heads = query.size(1), positions = query.size(2);
  TORCH_CHECK_VALUE(block >= 1 && positions % block == 0, "the sequence's length is ", positions,
                    ", expected a multiple of the block, ", block);
  const int64_t side = positions / block;
  TORCH_CHECK_VALUE(layout.dim() == 3 && layout.size(0) == heads && layout.size(1) == side && layout.size(2) == side,
                    "the layout is ", sizes_of(layout), ", expected (", heads, ", ", side, ", ", side, ") for ", heads,
                    " heads and ", positions, " positions in blocks of ", block);
}

void check_masks(const Masks& masks, const OptionalTensor& relative, const Tensor& query) {
  const int64_t batch = query.size(0), heads = query.size(1), positions = query.size(2);
  if (const OptionalTensor& mask = masks.key_padding_NS) {
    TORCH_CHECK_VALUE(mask->sizes() == at::IntArrayRef({batch, positions}), "key_padding_mask is ", sizes_of(*mask),
                      ", expected (", batch, ", ", positions, ")");
  }
  if (const OptionalTensor& mask = masks.attention_SS) {
    TORCH_CHECK_VALUE(mask->sizes() == at::IntArrayRef({positions, positions}), "attn_mask is ", sizes_of(*mask),
                      ", expected (", positions, ", ", positions, ")");
  }
  if (!relative) return;
  const auto fits = [&](int64_t dim, int64_t size) { return relative->size(dim) == size || relative->size(dim) == 1; };
  TORCH_CHECK_VALUE(relative->dim() == 4 && fits(0, batch) && fits(1, heads) && relative->size(2) == positions &&
                        relative->size(3) == positions,
                    "rpe is ", sizes_of(*relative), ", expected (", batch, " or 1, ", heads, " or 1, ", positions, ", ",
                    positions, ")");
}

OptionalTensor given(const OptionalTensor& tensor) { return tensor && tensor->defined() ? tensor : std::nullopt; }

}  // namespace

Tensor sparse_attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& layout,
                               int64_t block, std::optional<double> scale, bool causal,
                               const OptionalTensor& relative_position, const OptionalTensor& key_padding_mask,
                               const OptionalTensor& attention_mask, bool multiply_key_padding,
                               bool multiply_attention) {
  const Masks masks{given(key_padding_mask), given(attention_mask), multiply_key_padding, multiply_attention};
  const OptionalTensor relative = in_four_dimensions(relative_position);
  check_inputs(query, key, value);
  check_layout(layout, block, query);
  check_masks(masks, relative, query);
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  const Tensor on_host = layout.to(at::kCPU, at::kLong).contiguous();
  return SparseAttention::apply(query, key, value, relative, on_host, block, factor, causal, masks);
}

Tensor sparse_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& layout,
                        int64_t block, const SparseAttentionOptions& options) {
  static const auto op = dispatched<decltype(sparse_attention_kernel)>("deeptide::sparse_attention");
  return op.call(query, key, value, layout, block, options.scale, options.causal, options.relative_position,
                 options.key_padding_mask_NS, options.attention_mask_SS,
                 options.key_padding_mask_mode == MaskMode::multiply,
                 options.attention_mask_mode == MaskMode::multiply);
}

TORCH_LIBRARY_FRAGMENT(deeptide, library) {
  library.def(
      "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor layout, int block, float? scale=None, "
      "bool causal=False, Tensor? relative_position=None, Tensor? key_padding_mask=None, Tensor? attention_mask=None, "
      "bool multiply_key_padding=False, bool multiply_attention=True) -> Tensor",
      sparse_attention_kernel);
}

}  // namespace deeptide::ops
