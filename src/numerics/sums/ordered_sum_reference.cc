// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ordered sum in plain ATen operators, for any device.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <bit>

#include "numerics/sums/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::numerics::detail {
namespace {

/// In fp32, in new memory.
Tensor sum_by_pairs(at::TensorList rows) {
  if (rows.size() == 1) return rows[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  const size_t first = std::bit_ceil(rows.size()) / 2;
  const Tensor sum = sum_by_pairs(rows.slice(0, first));
  return sum.add_(rows.size() - first == 1 ? rows[first] : sum_by_pairs(rows.slice(first)));
}

}  // namespace

void ordered_sum_reference(at::TensorList rows, float scale, bool overwrite, const Tensor& accumulator,
                           const Tensor& sum_of_squares) {
  at::NoGradGuard no_grad;
  const Tensor sum = sum_by_pairs(rows).mul_(scale);
  accumulator.copy_(overwrite ? sum : sum.add_(accumulator));
  // Squares of large finite floats overflow in fp32; the norm casts as it reads.
  sum_of_squares.add_(at::linalg_vector_norm(accumulator, 2, at::OptionalIntArrayRef{}, false, at::kDouble).square_());
}

}  // namespace deeptide::numerics::detail
