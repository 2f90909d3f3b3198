// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules whose ranks exchange signs in place of gradients.
#pragma once

#include "gradients/reducer.h"
#include "optim/compressed/compressed_rule.h"
#include "zero/passes/step_tools.h"
#include "zero/transfers/sign_exchange.h"

namespace deeptide::zero {

/// Ranks have whole parameters and states, and hold their own gradients: what travels is the signs of what each makes
/// of them.
class SignSteps {
 public:
  SignSteps(const StepTools& tools, std::shared_ptr<device::Ledger> ledger);

  /// Collective.
  void step(gradients::Reducer& reducer, const StepInput& input);
  SignExchange& exchange() { return exchange_; }

 private:
  void take_mean(const UnitPass& pass, const Run& run, const at::Tensor& mean);
  void measure(const UnitPass& pass, const Run& run, const at::Tensor& mean);
  void join_slices();
  void apply(const StepInput& input);

  const StepTools& tools_;
  const optim::CompressedRule& rule_;
  SignExchange exchange_;
  /// One parameter in a step of a rule that takes norms.
  struct Measured {
    int unit;
    Run run;
    optim::TakenTotals totals;
  };
  std::vector<Measured> measured_;
};

}  // namespace deeptide::zero
