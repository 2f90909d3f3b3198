// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Relates counted operators to the measured machine.
#pragma once

#include <functional>
#include <vector>

#include "deeptide/profiler.h"

namespace deeptide::report {

/// The rate at the largest size, from `least` doubled to `most`, that has memory and is not expected to last longer.
/// `work_of`: a size's operations, or bytes. `rate_at`: those per second, measured. Units: seconds.
double rate_of_largest(int64_t least, int64_t most, double longest_s, const std::function<double(int64_t)>& work_of,
                       const std::function<double(int64_t)>& rate_at);

struct Roofline {
  int64_t macs = 0;
  double seconds = 0.0;
  double memory_bound = 0.0;  // share of the operators' time in those that memory limits
  double bytes_per_s = 0.0;   // that these moved
};

/// `timed`: whether the operators' own times count; else, as on a device, what their bounds allow.
Roofline judge(const std::vector<OperatorUse>& uses, const MachinePeak& peak, bool timed);

}  // namespace deeptide::report
