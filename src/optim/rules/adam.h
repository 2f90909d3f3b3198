// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adam's step by its numbers, for the rules that contain it.
#pragma once

#include "optim/rules/rule.h"
#include "optim/updates/update_scalars.h"

namespace deeptide::optim {

struct AdamNumbers {
  double lr = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, weight_decay = 0.0;
  bool decoupled = true;
  bool bias_correction = true;
};

namespace detail {

/// The numbers of step `step`.
AdamScalars adam_scalars(const AdamNumbers& numbers, int64_t step);

/// One step of a segment whose states are exp_avg and exp_avg_sq, on a CPU, or in ATen operators; the latter leaves
/// `param` to the caller.
void adam_cpu(const Segment& segment, const AdamNumbers& numbers, const StepTerms& terms);
void adam_aten(const Segment& segment, const AdamNumbers& numbers, const StepTerms& terms);

}  // namespace detail
}  // namespace deeptide::optim
