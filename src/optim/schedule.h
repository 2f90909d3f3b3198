// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules under DeepSpeed's names and formulas.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "deeptide/config.h"

namespace deeptide::optim {

/// A schedule is a pure function of the iteration; its only state is that number (starts at -1, before the first step).
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Sets what the schedule governs (lr; OneCycle also betas) for `iteration` in every group.
  /// `base`: the groups as they were at construction.
  virtual void apply(int64_t iteration, const std::vector<Hyperparameters>& base,
                     std::vector<Hyperparameters>& groups) const = 0;
};

/// Null when config.type is empty. Errors: ConfigError on an unknown type, a missing or a bad parameter.
std::unique_ptr<Schedule> make_schedule(const SchedulerConfig& config);

}  // namespace deeptide::optim
