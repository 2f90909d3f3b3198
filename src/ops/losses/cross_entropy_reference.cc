// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cross-entropy by torch, for other types and devices and for the tests.
#include <ATen/ops/cross_entropy_loss.h>

#include "ops/kernels.h"

namespace deeptide::ops {

using at::Tensor;

Tensor cross_entropy_reference(const Tensor& logits_NV, const Tensor& targets_N, int64_t ignore_index,
                               int64_t reduction, double label_smoothing) {
  const bool narrow = logits_NV.scalar_type() == at::kBFloat16 || logits_NV.scalar_type() == at::kHalf;
  return at::cross_entropy_loss(narrow ? logits_NV.to(at::kFloat) : logits_NV, targets_N, {}, reduction, ignore_index,
                                label_smoothing);
}

}  // namespace deeptide::ops
