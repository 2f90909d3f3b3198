// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attention over the spans of a layout, forward and backward, by torch's operators on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/attention/spans.h"

// Shapes: N sequences, H heads, S positions, D elements of a head.

namespace deeptide::ops {

/// Added to scaled scores; each may be undefined. Masks hold 0, -inf or other numbers, in the type of scores.
struct ScoreTerms {
  double scale = 1.0;
  bool causal = false;
  at::Tensor relative_position_NHSS;  // a view that may repeat its elements
  at::Tensor key_padding_mask_NS;
  at::Tensor attention_mask_SS;
};

struct AttentionGradients {
  at::Tensor query, key, value;  // as these
  at::Tensor relative_position;  // (N or 1, H or 1, S, S) as given; undefined unless asked for
};

at::Tensor attend(const at::Tensor& query_NHSD, const at::Tensor& key_NHSD, const at::Tensor& value_NHSD,
                  const std::vector<HeadGroup>& groups, const ScoreTerms& terms);

/// `relative_position`: the one that is to get a gradient, with its sizes of 1; undefined if none is.
AttentionGradients attend_backward(const at::Tensor& gradient_NHSD, const at::Tensor& query_NHSD,
                                   const at::Tensor& key_NHSD, const at::Tensor& value_NHSD,
                                   const std::vector<HeadGroup>& groups, const ScoreTerms& terms,
                                   const at::Tensor& relative_position);

}  // namespace deeptide::ops
