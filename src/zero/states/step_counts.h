// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How many steps have moved each parameter, the rule's numbers of it, and what one step moves alike.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "optim/rules/rule.h"
#include "sharding/unit.h"

namespace deeptide::zero {

/// The parameters that a step moves: those with a gradient, equal on all ranks.
struct ActiveParameters {
  std::vector<std::vector<bool>> by_unit;  // by unit and parameter; empty: all

  bool has(int unit, int parameter) const { return by_unit.empty() || by_unit[unit][parameter]; }
};

/// Elements of a unit that one step moves alike: consecutive active parameters of one group and one count of steps; a
/// single one if its step reaches beyond elements.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int group = 0;
  int64_t steps = 0;
  int parameter = 0;  // the first
  optim::Reach reach = optim::Reach::elementwise;
};

/// Units and their parameters are counted by position.
class StepCounts {
 public:
  StepCounts(std::vector<sharding::Unit*> units, const optim::Rule& rule);

  int64_t steps() const { return steps_; }
  /// How many steps moved each parameter that some steps left alone, by name.
  std::map<std::string, int64_t> uneven_steps() const;
  /// `uneven`: as from uneven_steps(); other parameters have taken all `steps`.
  void set_steps(int64_t steps, const std::map<std::string, int64_t>& uneven);
  /// The rule's numbers of one parameter, by position (Rule::parameter_numbers).
  std::span<double> numbers(int unit, int parameter) { return counts_[unit].numbers[parameter]; }
  /// The same by name; empty: the rule keeps none.
  std::map<std::string, std::vector<double>> parameter_numbers() const;
  /// A parameter that `saved` lacks starts anew.
  void set_parameter_numbers(const std::map<std::string, std::vector<double>>& saved);
  /// Counts this step; then, unit by unit, for the active parameters, and returns them as runs.
  void count_step() { ++steps_; }
  std::vector<Run> count_step(int unit, const ActiveParameters& active, const std::vector<Hyperparameters>& groups);

 private:
  struct UnitCounts {
    std::vector<int64_t> steps;  // by parameter, likewise
    std::vector<std::vector<double>> numbers;
  };

  std::vector<sharding::Unit*> units_;
  const optim::Rule& rule_;
  std::vector<UnitCounts> counts_;
  int64_t steps_ = 0;
};

}  // namespace deeptide::zero
