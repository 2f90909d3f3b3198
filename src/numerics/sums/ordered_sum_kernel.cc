// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands the rows' memory to the kernel of the ordered sum.
#include <ATen/ops/empty.h>

#include "numerics/kernels/kernel_tensors.h"
#include "numerics/sums/kernel_pieces.h"
#include "numerics/sums/ordered_sum.h"
#include "numerics/sums/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::numerics::detail {

static_assert(kernel::SumArguments::kPiece == SumReader::kBlock);

namespace {

constexpr Kernel<kernel::SumArguments> kSum{"sum", &device_kernels::has_sum, &device_kernels::sum};

}  // namespace

bool has_sum_kernel_on(at::Device device) { return kSum.is_on(device); }

bool has_sum_kernel(at::TensorList rows) {
  return rows.size() <= kernel::Rows::kMost && has_sum_kernel_on(rows[0].device());
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
  kSum.run(sum_of_squares.device(), arguments);
}

void ordered_squares_kernel(const Contributions& contributions, const Tensor& sum_of_squares) {
  const int64_t numel = contributions.numel;
  const Tensor scratch = at::empty({kernel::SumArguments::num_scratch(numel)}, sum_of_squares.options());
  kernel::SumArguments arguments;
  arguments.pieces = pieces_of(contributions);
  arguments.count = numel;
  arguments.scratch = scratch.mutable_data_ptr<double>();
  arguments.sum_of_squares = sum_of_squares.mutable_data_ptr<double>();
  kSum.run(sum_of_squares.device(), arguments);
}

}  // namespace deeptide::numerics::detail
