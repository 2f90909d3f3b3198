// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds row after row with ATen's operators.
#include "comm/transport/ordered_rows.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace deeptide::comm {

void add_rows_in_order(at::TensorList rows, at::Tensor output) {
  at::NoGradGuard no_grad;
  const bool narrow = c10::isReducedFloatingType(output.scalar_type());
  at::Tensor sum = narrow ? rows[0].to(at::kFloat) : output;
  if (!narrow && rows.size() > 1) {
    at::add_out(sum, rows[0], rows[1]);
  } else if (!narrow) {
    sum.copy_(rows[0]);
  }
  for (const at::Tensor& row : rows.slice(narrow ? 1 : std::min<size_t>(2, rows.size()))) sum.add_(row);
  if (narrow) output.copy_(sum);
}

OperationPtr reduce_scatter_in_order(Transport& transport, int64_t num_ranks, at::Tensor output, at::Tensor input) {
  at::Tensor rows = at::empty_like(input);
  return host::then(
      transport.all_to_all(rows, input, OwnRow::copied),
      [by_rank = rows.view({num_ranks, output.numel()}).unbind(0), output] { add_rows_in_order(by_rank, output); });
}

}  // namespace deeptide::comm
