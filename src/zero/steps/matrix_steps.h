// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules that take whole matrices: directions by slices, products by matrix, masters by slices again.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/rules/two_pass_rule.h"
#include "zero/passes/step_tools.h"

namespace deeptide::zero {

class MatrixSteps {
 public:
  explicit MatrixSteps(const StepTools& tools) : tools_(tools), rule_(*tools.rule().matrices()) {}

  /// Each rank makes its slice of the unit's directions, then the updates of the matrices in which its slice lies. If
  /// the host steps what a device trains, the device still makes the products. Collective, unless ranks have all.
  void step(const UnitPass& pass, const std::vector<Run>& runs);

 private:
  at::Tensor whole_direction(int unit, at::Tensor own);
  void apply_update(const UnitPass& pass, const Run& run, const at::Tensor& direction);

  const StepTools& tools_;
  const optim::MatrixRule& rule_;
};

}  // namespace deeptide::zero
