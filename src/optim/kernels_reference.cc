// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer steps in plain ATen operators, for any device.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sqrt.h>

#include "optim/kernels_detail.h"

using at::Tensor;

namespace deeptide::optim::detail {
namespace {

Tensor decayed_gradient(const Tensor& gradient, const Tensor& master, float gradient_scale, float l2_decay) {
  Tensor scaled = at::mul(gradient, gradient_scale);
  if (l2_decay != 0.0f) scaled.add_(master, l2_decay);
  return scaled;
}

}  // namespace

void adam_step_reference(const AdamSegment& segment, const AdamScalars& s) {
  at::NoGradGuard no_grad;
  const Tensor gradient = decayed_gradient(segment.gradient.sum(), segment.master, s.gradient_scale, s.l2_decay);
  segment.master.mul_(s.keep);
  segment.exp_avg.lerp_(gradient, s.first_weight);
  segment.exp_avg_sq.mul_(s.second_keep).addcmul_(gradient, gradient, s.second_weight);
  const Tensor denominator = at::sqrt(segment.exp_avg_sq).div_(s.root_scale).add_(s.eps);
  segment.master.addcdiv_(segment.exp_avg, denominator, -s.step_size);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

void sgd_step_reference(const SgdSegment& segment, const SgdScalars& s) {
  at::NoGradGuard no_grad;
  Tensor update = decayed_gradient(segment.gradient.sum(), segment.master, s.gradient_scale, s.l2_decay);
  if (segment.momentum.defined()) {
    if (s.first_step) {
      segment.momentum.copy_(update);
    } else {
      segment.momentum.mul_(s.momentum).add_(update, s.gradient_keep);
    }
    update = s.nesterov ? update.add_(segment.momentum, s.momentum) : segment.momentum;
  }
  segment.master.add_(update, -s.lr);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

}  // namespace deeptide::optim::detail
