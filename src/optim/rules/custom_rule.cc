// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Nothing steps by this rule: the caller's optimizer does.
#include "optim/rules/custom_rule.h"

#include "base/invariant.h"
#include "deeptide/custom_optimizer.h"

namespace deeptide {

CustomOptimizer::~CustomOptimizer() = default;

void CustomOptimizer::read_groups(std::vector<Hyperparameters>& /*groups*/) {}

namespace optim {

CustomRule::CustomRule(const OptimizerInfo& info) : Rule(info, {}, Reach::callers) {}

void CustomRule::step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  step_aten(segment, hyper, terms);
}

void CustomRule::step_aten(const Segment& /*segment*/, const Hyperparameters& /*hyper*/,
                           const StepTerms& /*terms*/) const {
  DEEPTIDE_INVARIANT(false, name(), " is the caller's, who steps it");
}

}  // namespace optim
}  // namespace deeptide
