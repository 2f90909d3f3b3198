// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's "scheduler" section; its params depend on the type.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key last_iteration() {
  return integer("last_batch_iteration", -1, "The iteration to go on from.")
      .later("the schedule's position comes from the checkpoint");
}

Key warmup_type() { return choice("warmup_type", "log", {"log", "linear"}, "Shape of the warm-up."); }

Key warmup_steps() { return integer("warmup_num_steps", 1000, "Steps of the warm-up.").at_least(1); }

Key total_steps() { return integer("total_num_steps", {}, "Steps of the whole schedule.").at_least(1).required(); }

Key warmup_min_lr() { return number("warmup_min_lr", 0.0, "Rate at the start.").at_least(0).or_list(); }

std::vector<Key> range_test_keys() {
  return {
      number("lr_range_test_min_lr", 1e-3, "Rate at the start.").at_least(0).or_list(),
      integer("lr_range_test_step_size", 2000, "Steps of one interval.").at_least(1),
      number("lr_range_test_step_rate", 1.0, "Growth in one interval.").at_least(0),
      flag("lr_range_test_staircase", false, "Grow in steps rather than steadily."),
      last_iteration(),
  };
}

std::vector<Key> one_cycle_keys() {
  return {
      number("cycle_min_lr", {}, "Lowest rate.").at_least(0).or_list().required(),
      number("cycle_max_lr", {}, "Highest rate.").at_least(0).or_list().required(),
      number("decay_lr_rate", 0.0, "Decay of the rate after the cycle.").at_least(0),
      integer("cycle_first_step_size", 2000, "Steps of the rise.").at_least(1),
      integer("cycle_second_step_size", {}, "Steps of the fall.").at_least(0).derives("cycle_first_step_size"),
      integer("cycle_first_stair_count", 0, "Stairs of the rise; 0: steady.").at_least(0),
      integer("cycle_second_stair_count", {}, "Stairs of the fall.").at_least(0).derives("cycle_first_stair_count"),
      integer("decay_step_size", 0, "Steps of one decay interval; 0: no decay.").at_least(0),
      flag("cycle_momentum", true, "Cycle the momentum (Adam: beta1) against the rate."),
      number("cycle_min_mom", 0.8, "Lowest momentum.").below_one().or_list(),
      number("cycle_max_mom", 0.9, "Highest momentum.").below_one().or_list(),
      number("decay_mom_rate", 0.0, "Growth of the momentum after the cycle.").at_least(0),
      last_iteration(),
  };
}

std::vector<Key> warmup_keys() {
  return {
      warmup_min_lr(),
      number("warmup_max_lr", {}, "Rate after the warm-up.").at_least(0).or_list().derives("each group's own lr"),
      warmup_steps(),
      warmup_type(),
      last_iteration(),
  };
}

std::vector<Key> warmup_decay_keys() {
  return {
      total_steps(),
      warmup_min_lr(),
      number("warmup_max_lr", 0.001, "Rate after the warm-up; \"auto\": the optimizer's lr.").at_least(0).or_list(),
      warmup_steps(),
      warmup_type(),
      last_iteration(),
  };
}

std::vector<Key> warmup_cosine_keys() {
  return {
      total_steps(),  number("warmup_min_ratio", 0.0, "Share of each group's lr at the start.").between(0, 1),
      warmup_steps(), number("cos_min_ratio", 1e-4, "Share of each group's lr at the end.").between(0, 1),
      warmup_type(),  last_iteration(),
  };
}

}  // namespace

std::vector<Key> scheduler_sections() {
  const std::vector<std::string> types = {"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
  return {section("scheduler", "The learning-rate schedule, when the program hands over none.",
                  {
                      choice("type", {}, types, "Which schedule.").derives("no schedule"),
                      section("params", "Its parameters.", {})
                          .by_type({{{"LRRangeTest"}, range_test_keys()},
                                    {{"OneCycle"}, one_cycle_keys()},
                                    {{"WarmupLR"}, warmup_keys()},
                                    {{"WarmupDecayLR"}, warmup_decay_keys()},
                                    {{"WarmupCosineLR"}, warmup_cosine_keys()}}),
                  })};
}

}  // namespace deeptide::config
