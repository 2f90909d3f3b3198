// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The two passes of a rule that takes norms of parameters, and what comes between them.
#pragma once

#include <vector>

#include "optim/rules/two_pass_rule.h"
#include "zero/passes/step_tools.h"
#include "zero/transfers/parameter_norms.h"

namespace deeptide::zero {

/// One step's.
class NormSteps {
 public:
  explicit NormSteps(const StepTools& tools);

  /// First pass: moves the states of one parameter and notes its squares, slice by slice.
  void measure(const UnitPass& pass, const Run& run);
  /// Collective where ranks have parts: makes ratios of all squares. `runs`: by unit.
  void exchange(const std::vector<std::vector<Run>>& runs, const std::vector<Hyperparameters>& groups);
  /// Second pass: moves the masters by the ratios. `runs`: of the unit, as for `exchange`.
  void apply(const UnitPass& pass, const std::vector<Run>& runs) const;

 private:
  const StepTools& tools_;
  const optim::NormRule& rule_;
  ParameterNorms norms_;
  std::vector<std::vector<double>> ratios_;  // by unit and run
};

}  // namespace deeptide::zero
