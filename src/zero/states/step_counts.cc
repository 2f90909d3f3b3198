// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts by parameter, and joins neighbours that a step moves alike.
#include "zero/states/step_counts.h"

namespace deeptide::zero {

StepCounts::StepCounts(std::vector<sharding::Unit*> units, const optim::Rule& rule)
    : units_(std::move(units)), rule_(rule) {
  for (const sharding::Unit* unit : units_) {
    UnitCounts& counts = counts_.emplace_back();
    counts.steps.assign(unit->parameters().size(), 0);
    counts.numbers.assign(unit->parameters().size(), rule_.parameter_numbers());
  }
}

std::map<std::string, int64_t> StepCounts::uneven_steps() const {
  std::map<std::string, int64_t> uneven;
  for (size_t i = 0; i < units_.size(); ++i) {
    const std::vector<int64_t>& steps = counts_[i].steps;
    for (size_t p = 0; p < steps.size(); ++p) {
      if (steps[p] != steps_) uneven[units_[i]->parameters()[p].name] = steps[p];
    }
  }
  return uneven;
}

void StepCounts::set_steps(int64_t steps, const std::map<std::string, int64_t>& uneven) {
  steps_ = steps;
  for (size_t i = 0; i < units_.size(); ++i) {
    for (size_t p = 0; p < counts_[i].steps.size(); ++p) {
      const auto found = uneven.find(units_[i]->parameters()[p].name);
      counts_[i].steps[p] = found == uneven.end() ? steps : found->second;
    }
  }
}

std::map<std::string, std::vector<double>> StepCounts::parameter_numbers() const {
  std::map<std::string, std::vector<double>> numbers;
  if (rule_.parameter_numbers().empty()) return numbers;
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto& parameters = units_[i]->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) numbers[parameters[p].name] = counts_[i].numbers[p];
  }
  return numbers;
}

void StepCounts::set_parameter_numbers(const std::map<std::string, std::vector<double>>& saved) {
  const std::vector<double> start = rule_.parameter_numbers();
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto& parameters = units_[i]->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto found = saved.find(parameters[p].name);
      const bool fits = found != saved.end() && found->second.size() == start.size();
      counts_[i].numbers[p] = fits ? found->second : start;
    }
  }
}

/// The gap after a parameter belongs to it where its step is elementwise.
std::vector<Run> StepCounts::count_step(int unit, const ActiveParameters& active,
                                        const std::vector<Hyperparameters>& groups) {
  const auto& parameters = units_[unit]->parameters();
  std::vector<int64_t>& steps = counts_[unit].steps;
  std::vector<Run> runs;
  for (int p = 0; p < static_cast<int>(parameters.size()); ++p) {
    if (!active.has(unit, p)) continue;
    ++steps[p];
    const int group = parameters[p].group;
    const optim::Reach reach = rule_.reach(groups.at(group));
    const bool apart = reach != optim::Reach::elementwise;
    const int64_t begin = parameters[p].offset;
    const int64_t next = p + 1 < static_cast<int>(parameters.size()) ? parameters[p + 1].offset : units_[unit]->numel();
    const int64_t end = apart ? begin + parameters[p].numel : next;
    const bool joins = !runs.empty() && !apart && runs.back().end == begin && runs.back().group == group &&
                       runs.back().steps == steps[p];
    if (joins) {
      runs.back().end = end;
    } else {
      runs.push_back({begin, end, group, steps[p], p, reach});
    }
  }
  return runs;
}

}  // namespace deeptide::zero
