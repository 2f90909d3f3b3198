// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums the ranks' gradient contributions in rank order with fp32 accumulation; norm and finite check ride along.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace deeptide::gradients {

/// accumulator = (overwrite ? 0 : accumulator) + scale * (row[0] + row[1] + … + row[W-1]), the inner sum in rank order
/// in fp32. Writes the sum of squares of the *new* accumulator to `sum_of_squares` (non-finite if any element is). The
/// sum of squares is taken in fp64 over fixed blocks added in order: it does not depend on the number of threads.
/// Shapes: rows: one a rank, (N,) fp32|bf16|fp16; accumulator (N,) fp32; sum_of_squares (1,) fp64, same device. N may
/// be 0.
void ordered_sum(at::TensorList rows, double scale, bool overwrite, at::Tensor accumulator, at::Tensor sum_of_squares);

/// accumulator = (overwrite ? 0 : accumulator) + gradient, with cast. Shapes: (N,) each; any float dtypes; N may be 0.
void accumulate(const at::Tensor& gradient, bool overwrite, at::Tensor accumulator);

struct NonFinite {
  int64_t index = 0;  // first bad element
  int rank = -1;      // first rank whose contribution is bad there; -1 when only the sum overflowed
};

/// Finds the first NaN or Inf after `ordered_sum` reported one. Slow path.
std::optional<NonFinite> find_non_finite(at::TensorList rows, const at::Tensor& accumulator);

}  // namespace deeptide::gradients
