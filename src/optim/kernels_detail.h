// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What kernels.cc hands to its two implementations: scalars rounded once, and the implementations' names.
#pragma once

#include "optim/kernels.h"

namespace deeptide::optim::detail {

/// Computed in double, rounded to float once, so that both implementations use the same numbers.
struct AdamScalars {
  float gradient_scale;
  float l2_decay;       // 0 when decoupled
  float keep;           // 1 - lr * weight_decay when decoupled, else 1
  float first_weight;   // 1 - beta1
  float second_weight;  // 1 - beta2
  float second_keep;    // beta2
  float step_size;      // lr / (1 - beta1^t)
  float root_scale;     // sqrt(1 - beta2^t)
  float eps;
};

struct SgdScalars {
  float gradient_scale;
  float l2_decay;
  float lr;
  float momentum;       // 0: no buffer
  float gradient_keep;  // 1 - dampening
  bool first_step;      // the buffer starts as the gradient
  bool nesterov;
};

AdamScalars adam_scalars(const Hyperparameters& hyper, int64_t step, double gradient_scale);
SgdScalars sgd_scalars(const Hyperparameters& hyper, int64_t step, double gradient_scale);

/// Vector code, chosen at run time; every element takes the same instructions wherever it lies.
void adam_step_cpu(const AdamSegment& segment, const AdamScalars& scalars);
void sgd_step_cpu(const SgdSegment& segment, const SgdScalars& scalars);
const char* chosen_target();

/// The same in ATen operators: the oracle in tests, and what runs on devices without a kernel of their own.
void adam_step_reference(const AdamSegment& segment, const AdamScalars& scalars);
void sgd_step_reference(const SgdSegment& segment, const SgdScalars& scalars);

}  // namespace deeptide::optim::detail
