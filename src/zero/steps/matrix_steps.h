// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules that take whole matrices: directions by slices, products by matrix, masters by slices again.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "optim/rules/two_pass_rule.h"
#include "zero/passes/step_tools.h"

namespace deeptide::zero {

class MatrixSteps {
 public:
  explicit MatrixSteps(const StepTools& tools) : tools_(tools), rule_(*tools.rule().matrices()) {}

  /// Each rank makes its slice of the unit's directions, then the updates of the matrices in which its slice lies,
  /// which it joins where ranks along the tensor axis share them. If the host steps what a device trains, the device
  /// still makes the products. Collective, unless ranks have all.
  void step(const UnitPass& pass, const std::vector<Run>& runs);

 private:
  at::Tensor all_directions(int unit, at::Tensor own);
  at::Tensor gathered(at::Tensor own, const comm::Team& over, const std::string& what);
  /// Values (N,), bf16, that move a range of a parameter's elements, and the sizes of its matrix.
  struct Update {
    at::Tensor values;
    optim::MatrixSizes sizes;
  };
  Update update_of(const sharding::Unit& unit, const sharding::Parameter& p, tiers::Block range,
                   const Hyperparameters& hyper, const at::Tensor& directions) const;
  void apply_update(const UnitPass& pass, const Run& run, const at::Tensor& directions);

  const StepTools& tools_;
  const optim::MatrixRule& rule_;
};

}  // namespace deeptide::zero
