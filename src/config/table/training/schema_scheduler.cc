// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's "scheduler" section; its params depend on the type, and each type fills a struct of its own.
#include "config/table/binding.h"
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key last_iteration() {
  return integer("last_batch_iteration", -1, "The iteration from which to continue.")
      .later("the checkpoint holds the schedule's position");
}

template <class Warmup>
Key warmup_type() {
  return choice<WarmupShape>("warmup_type", WarmupShape::log,
                             {{"log", WarmupShape::log}, {"linear", WarmupShape::linear}}, "Shape of the warm-up.")
      .into(&Warmup::shape);
}

template <class Warmup>
Key warmup_steps() {
  return integer("warmup_num_steps", 1000, "Steps of the warm-up.").at_least(1).into(&Warmup::num_steps);
}

template <class Schedule>
Key total_steps() {
  return integer("total_num_steps", {}, "Steps of the whole schedule.")
      .at_least(1)
      .required()
      .into(&Schedule::total_steps);
}

template <class Warmup>
Key warmup_min_lr() {
  return number("warmup_min_lr", 0.0, "Rate at the start.").at_least(0).or_list().into(&Warmup::min_lr);
}

std::vector<Key> range_test_keys() {
  using Range = LRRangeTestConfig;
  return {
      number("lr_range_test_min_lr", 1e-3, "Rate at the start.").at_least(0).or_list().into(&Range::min_lr),
      integer("lr_range_test_step_size", 2000, "Steps per interval.").at_least(1).into(&Range::step_size),
      number("lr_range_test_step_rate", 1.0, "Growth per interval.").at_least(0).into(&Range::step_rate),
      flag("lr_range_test_staircase", false, "Grow in steps rather than steadily.").into(&Range::staircase),
      last_iteration(),
  };
}

std::vector<Key> one_cycle_keys() {
  using Cycle = OneCycleConfig;
  return {
      number("cycle_min_lr", {}, "Lowest rate.").at_least(0).or_list().required().into(&Cycle::min_lr),
      number("cycle_max_lr", {}, "Highest rate.").at_least(0).or_list().required().into(&Cycle::max_lr),
      number("decay_lr_rate", 0.0, "Decay of the rate after the cycle.").at_least(0).into(&Cycle::decay_lr_rate),
      integer("cycle_first_step_size", 2000, "Steps of the rise.").at_least(1).into(&Cycle::first_step_size),
      integer("cycle_second_step_size", {}, "Steps of the fall.")
          .at_least(0)
          .derives_from("cycle_first_step_size")
          .into(&Cycle::second_step_size),
      integer("cycle_first_stair_count", 0, "Stairs of the rise; 0: steady.")
          .at_least(0)
          .into(&Cycle::first_stair_count),
      integer("cycle_second_stair_count", {}, "Stairs of the fall.")
          .at_least(0)
          .derives_from("cycle_first_stair_count")
          .into(&Cycle::second_stair_count),
      integer("decay_step_size", 0, "Steps per decay interval; 0: no decay.").at_least(0).into(&Cycle::decay_step_size),
      flag("cycle_momentum", true, "Cycle the momentum (Adam: beta1) against the rate.").into(&Cycle::cycle_momentum),
      number("cycle_min_mom", 0.8, "Lowest momentum.").below_one().or_list().into(&Cycle::min_momentum),
      number("cycle_max_mom", 0.9, "Highest momentum.").below_one().or_list().into(&Cycle::max_momentum),
      number("decay_mom_rate", 0.0, "Growth of the momentum after the cycle.")
          .at_least(0)
          .into(&Cycle::decay_momentum_rate),
      last_iteration(),
  };
}

std::vector<Key> warmup_keys() {
  using Warmup = WarmupLRConfig;
  return {
      warmup_min_lr<Warmup>(),
      number("warmup_max_lr", {}, "Rate after the warm-up.")
          .at_least(0)
          .or_list()
          .derives("each group's own lr")
          .into(&Warmup::max_lr),
      warmup_steps<Warmup>(),
      warmup_type<Warmup>(),
      last_iteration(),
  };
}

std::vector<Key> warmup_decay_keys() {
  using Warmup = WarmupDecayLRConfig;
  return {
      total_steps<Warmup>(),
      warmup_min_lr<Warmup>(),
      number("warmup_max_lr", 0.001, "Rate after the warm-up; \"auto\": the optimizer's lr.")
          .at_least(0)
          .or_list()
          .auto_from("optimizer.params.lr")
          .into(&Warmup::max_lr),
      warmup_steps<Warmup>(),
      warmup_type<Warmup>(),
      last_iteration(),
  };
}

std::vector<Key> warmup_cosine_keys() {
  using Warmup = WarmupCosineLRConfig;
  return {
      total_steps<Warmup>(),
      number("warmup_min_ratio", 0.0, "Share of each group's lr at the start.").between(0, 1).into(&Warmup::min_ratio),
      warmup_steps<Warmup>(),
      number("cos_min_ratio", 1e-4, "Share of each group's lr at the end.").between(0, 1).into(&Warmup::cos_min_ratio),
      warmup_type<Warmup>(),
      last_iteration(),
  };
}

template <class Schedule>
Variant of_type(std::vector<Key> keys) {
  return {{std::string(Schedule::kType)}, std::move(keys)};
}

}  // namespace

std::vector<Key> scheduler_sections() {
  std::vector<Variant> params = {of_type<LRRangeTestConfig>(range_test_keys()),
                                 of_type<OneCycleConfig>(one_cycle_keys()), of_type<WarmupLRConfig>(warmup_keys()),
                                 of_type<WarmupDecayLRConfig>(warmup_decay_keys()),
                                 of_type<WarmupCosineLRConfig>(warmup_cosine_keys())};
  std::vector<std::string> types;
  for (const Variant& variant : params) types.push_back(variant.types.front());
  return {section("scheduler", "The learning-rate schedule, when the program hands over none.",
                  {
                      choice("type", {}, std::move(types), "Which schedule.")
                          .derives("no schedule")
                          .read_by("the keys of params, which fill the struct of their type"),
                      section("params", "Its parameters.", {}).by_type(std::move(params)),
                  })};
}

}  // namespace deeptide::config
