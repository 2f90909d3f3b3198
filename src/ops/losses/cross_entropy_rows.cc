// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of rows of logits by torch's operators, the gradient along with the loss; the host waits for nothing.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>

#include "ops/kernels.h"

namespace deeptide::ops {

using at::Tensor;

void cross_entropy_rows(const Tensor& logits_NV, const Tensor& targets_N, const CrossEntropyTerms& terms,
                        const Tensor& scale, const Tensor& losses_N, const Tensor& gradient_NV) {
  const Tensor ignored_N1 = targets_N.eq(terms.ignore_index).unsqueeze(1);
  const Tensor class_N1 = targets_N.unsqueeze(1).masked_fill(ignored_N1, 0);
  Tensor shares_NV = at::log_softmax(logits_NV, 1, at::kFloat);
  const double smoothing = terms.label_smoothing;
  Tensor losses_N1 = shares_NV.gather(1, class_N1).mul_(smoothing - 1.0);
  if (smoothing != 0.0) losses_N1.sub_(shares_NV.mean(1, /*keepdim=*/true), smoothing);
  losses_N.copy_(losses_N1.masked_fill_(ignored_N1, 0.0).squeeze(1));
  if (!gradient_NV.defined()) return;
  shares_NV.exp_();
  if (smoothing != 0.0) shares_NV.sub_(smoothing / static_cast<double>(logits_NV.size(1)));
  shares_NV.scatter_add_(1, class_N1, at::full_like(class_N1, smoothing - 1.0, losses_N1.options()));
  if (terms.gradient_scale != 1.0) shares_NV.mul_(terms.gradient_scale);
  if (scale.defined()) shares_NV.mul_(scale);
  gradient_NV.copy_(shares_NV.masked_fill_(ignored_N1, 0.0));
}

}  // namespace deeptide::ops
