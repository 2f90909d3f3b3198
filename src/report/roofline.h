// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Relates counted operators to the measured machine.
#pragma once

#include <vector>

#include "deeptide/profiler.h"

namespace deeptide::report {

struct Roofline {
  int64_t macs = 0;
  double seconds = 0.0;
  double memory_bound = 0.0;  // share of the operators' time in those that memory limits
  double bytes_per_s = 0.0;   // that these moved
};

/// `timed`: whether the operators' own times count; else, as on a device, what their bounds allow.
Roofline judge(const std::vector<OperatorUse>& uses, const MachinePeak& peak, bool timed);

}  // namespace deeptide::report
