// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer kernels: one pass over a flat shard. Device-generic entry points; the CPU has its own vector code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "deeptide/config.h"
#include "numerics/ordered_sum.h"

namespace deeptide::optim {

/// The flat tensors of one segment, all (N,), contiguous, on one device. `param` may be undefined (fp32 training:
/// `master` is the parameter itself), else bf16/fp16 and receives the rounded master.
struct AdamSegment {
  at::Tensor master;                  // fp32, updated
  at::Tensor exp_avg;                 // fp32, updated
  at::Tensor exp_avg_sq;              // fp32, updated
  numerics::Contributions gradient;  // read, and summed on the way
  at::Tensor param;                   // bf16 | fp16 | undefined, written
};

/// One Adam or AdamW step, in torch's order of operations (torch.optim.AdamW, fused form):
/// g = gradient*gradient_scale (+ wd*p if not decoupled); p *= 1-lr*wd if decoupled; m = m+(1-b1)(g-m); v =
/// b2*v+(1-b2)g*g; p -= lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps). Elementwise: the result does not depend on how
/// a shard is cut. `step`: t, counted from 1. Bytes moved per element: 28 in fp32, 30 with a bf16 parameter, 28 when
/// its gradient is one bf16 row. Source: Kingma & Ba arXiv:1412.6980; Loshchilov & Hutter arXiv:1711.05101.
void adam_step(const AdamSegment& segment, const Hyperparameters& hyper, int64_t step, double gradient_scale);

struct SgdSegment {
  at::Tensor master;                  // fp32, updated
  at::Tensor momentum;                // fp32, updated; undefined when hyper.momentum == 0
  numerics::Contributions gradient;  // read, and summed on the way
  at::Tensor param;                   // bf16 | fp16 | undefined, written
};

/// One SGD step as torch.optim.SGD's (weight decay L2, momentum buffer starts as the first gradient, dampening,
/// Nesterov).
void sgd_step(const SgdSegment& segment, const Hyperparameters& hyper, int64_t step, double gradient_scale);

/// Highway's name of the instruction set that the steps above run on here, such as "AVX3_ZEN4".
const char* kernel_target();

}  // namespace deeptide::optim
