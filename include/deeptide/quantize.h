// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values rounded to few bits and kept in their type, masks of the largest values, gradients that pass both.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "deeptide/export.h"

// Shapes: a tensor is cut into G groups of as many elements each, in order; each group has a scale of its own.

namespace deeptide::ops {

/// Returns `value`, whose gradient goes to `source` as it is. Shapes: alike.
DEEPTIDE_API at::Tensor straight_through(const at::Tensor& source, const at::Tensor& value);

/// Multiples of a scale from -2^(bits - 1) to 2^(bits - 1) - 1; a group of zeros stays. `noise`, (G, numel / G), is
/// added before rounding. `bound`: the largest magnitude, else each group's own.
DEEPTIDE_API at::Tensor quantize_symmetric(const at::Tensor& x, int64_t bits, int64_t groups = 1,
                                           const std::optional<at::Tensor>& noise = {},
                                           const std::optional<at::Tensor>& bound = {});
/// 2^bits levels from the smallest value on; a group of equal values stays. `low`, `high`: the range, if given.
DEEPTIDE_API at::Tensor quantize_asymmetric(const at::Tensor& x, int64_t bits, int64_t groups = 1,
                                            const std::optional<at::Tensor>& noise = {},
                                            const std::optional<at::Tensor>& low = {},
                                            const std::optional<at::Tensor>& high = {});
/// Rounds to `bits`: 2 is ternary (arXiv:1605.04711), 1 binary (arXiv:1603.05279), which know neither asymmetric ranges
/// nor noise.
DEEPTIDE_API at::Tensor quantize(const at::Tensor& x, int64_t bits, int64_t groups = 1, bool is_symmetric = true,
                                 const std::optional<at::Tensor>& noise = {});

/// True at the ceil(share * numel) largest scores, in the shape of `scores`.
DEEPTIDE_API at::Tensor largest_mask(const at::Tensor& scores, double share);

}  // namespace deeptide::ops
