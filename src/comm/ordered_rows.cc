// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Row after row, in ATen's operators.
#include "comm/ordered_rows.h"

#include <ATen/core/grad_mode.h>

namespace deeptide::comm {

void add_rows_in_order(const at::Tensor& rows, int64_t size, at::Tensor output) {
  at::NoGradGuard no_grad;
  const at::Tensor by_rank = rows.view({size, -1});
  const bool narrow = c10::isReducedFloatingType(rows.scalar_type());
  at::Tensor sum = narrow ? by_rank[0].to(at::kFloat) : by_rank[0].clone();
  for (int64_t r = 1; r < size; ++r) sum.add_(by_rank[r]);
  output.copy_(sum);
}

}  // namespace deeptide::comm
