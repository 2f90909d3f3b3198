// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules as functions of a step, in doubles, in the order of operations that gives DeepSpeed's values.
#include "deeptide/curriculum.h"

#include <ATen/ops/rand.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "config/section.h"
#include "data/section_reader.h"

namespace deeptide {
namespace {

using data::SectionReader;

int64_t at_least_one(const SectionReader& section, std::string_view key) {
  const int64_t number = section.integer(key);
  if (number < 1) section.fail(key, "got " + std::to_string(number) + ", expected at least 1");
  return number;
}

// min + (step / total)^(1 / degree) * (max - min), cut to a multiple, before any bound.
int64_t grown(int64_t step, int64_t total, double degree, int64_t low, int64_t high, int64_t multiple) {
  const double share = std::pow(static_cast<double>(step) / static_cast<double>(total), 1.0 / degree);
  const auto value =
      static_cast<int64_t>(std::floor(share * static_cast<double>(high - low) + static_cast<double>(low)));
  return value - value % multiple;
}

}  // namespace

CurriculumSchedule CurriculumSchedule::from_config(const Config& config) {
  return from_text(to_text(config::section_with_defaults(config, "curriculum_learning")));
}

CurriculumSchedule CurriculumSchedule::from_text(std::string_view text, std::string_view origin) {
  const JsonValue parsed = parse_json(text, std::string(origin));
  const SectionReader section(parsed, std::string(origin));
  CurriculumSchedule schedule;
  schedule.min_ = schedule.current_ = section.integer("min_difficulty");
  schedule.max_ = section.integer("max_difficulty");
  if (schedule.min_ > schedule.max_) {
    section.fail("min_difficulty", std::to_string(schedule.min_) + " exceeds max_difficulty, " +
                                       std::to_string(schedule.max_) + "; give a lower one");
  }
  const std::string type = section.word("schedule_type");
  if (type == "custom") {
    schedule.type_ = Type::custom;
    return schedule;
  }
  if (type != "fixed_linear" && type != "fixed_root" && type != "fixed_discrete") {
    section.fail("schedule_type", "got \"" + type + "\", expected fixed_linear, fixed_root, fixed_discrete or custom");
  }
  const SectionReader numbers = section.below("schedule_config");
  if (type == "fixed_discrete") {
    schedule.type_ = Type::fixed_discrete;
    schedule.difficulties_ = numbers.integers("difficulty");
    schedule.last_steps_ = numbers.integers("max_step");
    if (schedule.difficulties_.size() != schedule.last_steps_.size() + 1) {
      numbers.fail("difficulty", "got " + std::to_string(schedule.difficulties_.size()) + " difficulties for " +
                                     std::to_string(schedule.last_steps_.size()) +
                                     " values of max_step, expected one more: the last difficulty stays");
    }
    return schedule;
  }
  schedule.total_steps_ = at_least_one(numbers, "total_curriculum_step");
  schedule.multiple_ = at_least_one(numbers, "difficulty_step");
  if (type == "fixed_root") schedule.degree_ = static_cast<double>(at_least_one(numbers, "root_degree"));
  return schedule;
}

int64_t CurriculumSchedule::at(int64_t step) const {
  if (type_ == Type::custom) {
    if (!function_) {
      throw ConfigError(
          "curriculum: the schedule \"custom\" has no function; set one by set_custom_curriculum_learning_schedule "
          "before the first step");
    }
    return function_(step);
  }
  if (type_ == Type::fixed_discrete) {
    for (size_t i = 0; i < last_steps_.size(); ++i) {
      if (step <= last_steps_[i]) return difficulties_[i];
    }
    return difficulties_.back();
  }
  const int64_t lowest = (min_ + multiple_ - 1) / multiple_ * multiple_;
  return std::min(std::max(grown(step, total_steps_, degree_, min_, max_, multiple_), lowest), max_);
}

int64_t CurriculumSchedule::update(int64_t step) {
  if (current_ < max_) current_ = at(step);
  return current_;
}

void CurriculumSchedule::set_function(Function function) {
  if (type_ != Type::custom) {
    throw ConfigError(
        "curriculum: a function was given to a schedule that is not \"custom\" and would not use it; set schedule_type "
        "to \"custom\", or leave the function out");
  }
  function_ = std::move(function);
}

RandomLtdSchedule::RandomLtdSchedule(const Numbers& numbers) : numbers_(numbers) {
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    throw ConfigError(std::string("random_ltd: ") + name + " is " + std::to_string(value) + ", expected " +
                      std::to_string(low) + " to " + std::to_string(high));
  };
  constexpr int64_t kMost = int64_t{1} << 40;
  check("total_layer_num", numbers.total_layers, 1, kMost);
  check("random_ltd_layer_num", numbers.dropping_layers, 0, numbers.total_layers);
  check("max_value", numbers.max_length, 1, kMost);
  check("min_value", numbers.min_length, 1, numbers.max_length);
  check("require_steps", numbers.steps, 1, kMost);
  check("seq_per_step", numbers.multiple, 1, kMost);
  check("the global batch", numbers.global_batch, 1, kMost);
  position_.length = numbers.min_length;
}

RandomLtdSchedule RandomLtdSchedule::from_config(const Config& config, int64_t global_batch) {
  const std::string path = "data_efficiency.data_routing.random_ltd";
  const JsonValue value = config::section_with_defaults(config, path);
  const SectionReader section(value, path);
  const SectionReader schedule = section.below("random_ltd_schedule");
  const SectionReader growth = schedule.below("schedule_config");
  return RandomLtdSchedule({.total_layers = section.integer("total_layer_num"),
                            .dropping_layers = section.integer("random_ltd_layer_num"),
                            .min_length = schedule.integer("min_value"),
                            .max_length = schedule.integer("max_value"),
                            .steps = growth.integer("require_steps"),
                            .multiple = growth.integer("seq_per_step"),
                            .global_batch = global_batch});
}

int64_t RandomLtdSchedule::at(int64_t step) const {
  const auto& n = numbers_;
  return std::min(grown(step, n.steps, 1.0, n.min_length, n.max_length, n.multiple), n.max_length);
}

int64_t RandomLtdSchedule::update(int64_t step) {
  const auto& n = numbers_;
  if (position_.length < n.max_length) position_.length = at(step);
  if (step != position_.step) {
    position_.layer_tokens +=
        n.global_batch * (position_.length * n.dropping_layers + n.max_length * (n.total_layers - n.dropping_layers));
    position_.step = step;
  }
  return position_.length;
}

int64_t RandomLtdSchedule::layer_tokens_after(int64_t steps) const {
  RandomLtdSchedule copy = *this;
  for (int64_t step = 0; step < steps; ++step) copy.update(step);
  return copy.position_.layer_tokens;
}

ProgressiveLayerDrop::ProgressiveLayerDrop(double theta, double gamma) : theta_(theta), gamma_(gamma) {
  if (!(theta >= 0.0 && theta <= 1.0)) {
    throw ConfigError("progressive_layer_drop: theta is " + std::to_string(theta) + ", expected 0 to 1");
  }
  if (!(gamma >= 0.0)) {
    throw ConfigError("progressive_layer_drop: gamma is " + std::to_string(gamma) + ", expected at least 0");
  }
}

ProgressiveLayerDrop ProgressiveLayerDrop::from_config(const Config& config) {
  const JsonValue section = config::section_with_defaults(config, "progressive_layer_drop");
  return ProgressiveLayerDrop(section.find("theta")->value.number, section.find("gamma")->value.number);
}

void ProgressiveLayerDrop::update(int64_t step) {
  current_ = (1.0 - theta_) * std::exp(-gamma_ * static_cast<double>(step)) + theta_;
}

double ProgressiveLayerDrop::keep_probability(int64_t layer, int64_t num_layers, double share) {
  if (num_layers < 1 || layer < 0 || layer >= num_layers) {
    throw ConfigError("keep_probability: layer " + std::to_string(layer) + " of " + std::to_string(num_layers) +
                      ", expected a layer from 0 to below the number of layers");
  }
  return 1.0 - static_cast<double>(layer) / static_cast<double>(num_layers) * (1.0 - share);
}

bool ProgressiveLayerDrop::drops(int64_t layer, int64_t num_layers) const {
  const double keep = keep_probability(layer, num_layers, current_);
  return keep < 1.0 && at::rand({}).item<double>() >= keep;
}

}  // namespace deeptide
