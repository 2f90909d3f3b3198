// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules under DeepSpeed's names and formulas.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "deeptide/config.h"

namespace deeptide::optim {

/// A schedule is a pure function of the iteration, which the caller keeps: -1 at construction, 0 in the first step.
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Sets lr (OneCycle: also the betas) of every group for `iteration`.
  /// `base`: the groups as they were at construction.
  virtual void apply(int64_t iteration, const std::vector<Hyperparameters>& base,
                     std::vector<Hyperparameters>& groups) const = 0;
};

/// The highest learning rate that a schedule sets in every group, whatever the group's own is; and its key.
struct SchedulePeak {
  const char* key = "";
  double lr = 0.0;
};
/// None: the groups' own rates count.
std::optional<SchedulePeak> peak_of(const SchedulerConfig& config);

/// Null without a schedule. `config`: from the table of keys, which has checked every parameter and filled defaults.
std::unique_ptr<Schedule> make_schedule(const SchedulerConfig& config);

}  // namespace deeptide::optim
