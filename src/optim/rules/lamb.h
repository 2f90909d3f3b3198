// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// LAMB's two passes by their numbers, for the rules that contain them.
#pragma once

#include "optim/rules/two_pass_rule.h"

namespace deeptide::optim {

struct LambNumbers {
  double lr = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, weight_decay = 0.0;
  bool eps_inside_sqrt = false;
  bool bias_correction = true;
  bool mean_where_unreached = false;  // the mean stands in for the root of a second moment of 0, as signs need
};

namespace detail {

/// The passes of a segment whose first states are exp_avg and exp_avg_sq, on a CPU, or in ATen operators; the latter
/// leave `param` to the caller. As NormRule::measure and NormRule::apply.
void lamb_measure_cpu(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, int64_t first,
                      NormSums& sums);
void lamb_measure_aten(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, int64_t first,
                       NormSums& sums);
void lamb_apply_cpu(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, double ratio);
void lamb_apply_aten(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, double ratio);

/// The numbers of both passes; `ratio` is the second's.
LambScalars lamb_scalars(const LambNumbers& numbers, const StepTerms& terms, double ratio);

/// The trust ratio within its bounds; 1 where either norm is 0.
double lamb_ratio(const NormSquares& whole, double min_coeff, double max_coeff);

}  // namespace detail
}  // namespace deeptide::optim
