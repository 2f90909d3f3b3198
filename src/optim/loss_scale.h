// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The factor that keeps fp16 gradients above the smallest number: fixed, or found by growing until it overflows.
#pragma once

#include <cstdint>

#include "deeptide/config.h"

namespace deeptide::optim {

/// The memory of a loss scaler from step to step; part of every checkpoint.
struct LossScale {
  double scale = 1.0;
  int64_t steps = 0;           // applied and skipped
  int64_t last_overflow = -1;  // the step that overflowed last
  int64_t hysteresis = 1;      // overflows that are left before the scale is halved

  bool operator==(const LossScale&) const = default;
};

/// 1 unless the configuration computes in fp16, or casts to it.
LossScale initial_loss_scale(const PrecisionConfig& config);

/// The scale after a step. Halved, down to the minimum, when `hysteresis` overflows have come; doubled after each
/// window of steps without one. A fixed scale, and that of other types than fp16, stays. Source: the update of
/// DeepSpeed's DynamicLossScaler, at every stage alike.
LossScale next_loss_scale(const PrecisionConfig& config, LossScale now, bool overflow);

}  // namespace deeptide::optim
