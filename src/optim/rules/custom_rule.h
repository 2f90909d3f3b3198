// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The rule of an optimizer that the caller brings: its name and hyper-parameters; the optimizer keeps its own states.
#pragma once

#include "optim/rules/rule.h"

namespace deeptide::optim {

class CustomRule final : public Rule {
 public:
  explicit CustomRule(const OptimizerInfo& info);

 private:
  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override;
  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override;
};

}  // namespace deeptide::optim
