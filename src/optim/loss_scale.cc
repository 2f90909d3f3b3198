// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Grows and shrinks the loss scale.
#include "optim/loss_scale.h"

#include <algorithm>
#include <cmath>

namespace deeptide::optim {

LossScale initial_loss_scale(const PrecisionConfig& config) {
  LossScale initial;
  initial.hysteresis = config.hysteresis;
  if (!config.scales_loss()) return initial;
  initial.scale =
      config.loss_scale > 0.0 ? config.loss_scale : std::ldexp(1.0, static_cast<int>(config.initial_scale_power));
  return initial;
}

LossScale next_loss_scale(const PrecisionConfig& config, LossScale now, bool overflow) {
  if (!config.scales_loss()) return now;  // its steps stay 0: a checkpoint shows that it has no scale to give
  const int64_t step = now.steps++;
  if (config.loss_scale > 0.0) return now;
  if (overflow) {
    now.last_overflow = step;
    if (now.hysteresis > 1) {
      --now.hysteresis;
    } else {
      now.scale = std::max(now.scale / 2.0, static_cast<double>(config.min_loss_scale));
    }
    return now;
  }
  if (config.consecutive_hysteresis) now.hysteresis = config.hysteresis;
  const int64_t stable = step - now.last_overflow - 1;
  if (stable > 0 && stable % config.loss_scale_window == 0) {
    now.hysteresis = config.hysteresis;
    now.scale *= 2.0;
  }
  return now;
}

}  // namespace deeptide::optim
