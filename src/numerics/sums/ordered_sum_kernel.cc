// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands the rows' memory to the kernel of the ordered sum.
#include <ATen/ops/empty.h>

#include "numerics/kernels/kernel_tensors.h"
#include "numerics/sums/ordered_sum.h"
#include "numerics/sums/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::numerics::detail {

static_assert(kernel::SumArguments::kPiece == SumReader::kBlock);

bool has_sum_kernel(at::TensorList rows) {
  return rows.size() <= kernel::Rows::kMost && has_kernel_on(rows[0].device(), &device_kernels::has_sum);
}

kernel::SumArguments sum_arguments(at::TensorList rows, float scale, bool overwrite, const Tensor& accumulator,
                                   const Tensor& scratch, const Tensor& sum_of_squares) {
  return {.rows = rows_of(rows, scale),
          .accumulator = numbers_of(accumulator),
          .overwrite = overwrite,
          .count = rows[0].numel(),
          .scratch = scratch.mutable_data_ptr<double>(),
          .sum_of_squares = sum_of_squares.mutable_data_ptr<double>()};
}

void ordered_sum_kernel(at::TensorList rows, float scale, bool overwrite, const Tensor& accumulator,
                        const Tensor& sum_of_squares) {
  const Tensor scratch = at::empty({kernel::SumArguments::num_scratch(rows[0].numel())}, sum_of_squares.options());
  const auto arguments = sum_arguments(rows, scale, overwrite, accumulator, scratch, sum_of_squares);
  launch_on(sum_of_squares.device(), [&](void* stream) { device_kernels::sum(arguments, stream); });
}

}  // namespace deeptide::numerics::detail
