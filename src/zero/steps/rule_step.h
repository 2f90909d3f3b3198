// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One step by a rule, over the mean of all ranks' gradients.
#pragma once

#include <optional>
#include <vector>

#include "zero/passes/step_tools.h"
#include "zero/passes/whole_gradients.h"
#include "zero/steps/norm_steps.h"

namespace deeptide::zero {

/// Lives as long as the step takes, and does not outlive what it is given.
class RuleStep {
 public:
  RuleStep(const StepTools& tools, const gradients::Reducer& reducer, const StepInput& input, Publication& publication);
  void run();

 private:
  HostExchange::Step* copies() { return copies_ ? &*copies_ : nullptr; }
  UnitPass pass_of(int unit, gradients::UnitGradient gradient, Side side);
  void announce(int unit, const at::Tensor& gradient);
  void issue_for_device();
  void gather_ahead(int unit);
  void step_unit(int unit);
  void step_own_first(int unit);
  void first_pass(const UnitPass& pass);
  void step_elements(const UnitPass& pass, const Run& run) const;
  void second_pass();
  void publish(int unit);

  const StepTools& tools_;
  const gradients::Reducer& reducer_;
  const StepInput& input_;
  Publication& publication_;
  std::vector<std::vector<Run>> runs_;        // by unit
  std::optional<NormSteps> norms_;            // absent: the rule takes no norms, and needs no second pass
  std::optional<HostExchange::Step> copies_;  // between device and host; absent: the host steps nothing of a device
  WholeGradients gathers_;
  int next_to_gather_ = 0;
};

}  // namespace deeptide::zero
