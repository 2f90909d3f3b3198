// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The schedules against tables worked out by hand, and their errors.
#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "deeptide/errors.h"

namespace deeptide::optim {
namespace {

using Params = nlohmann::json;

SchedulerConfig scheduler_of(const std::string& type, const Params& params) {
  const Params section = {{"type", type}, {"params", params.is_null() ? Params::object() : params}};
  return Config::from_text(Params{{"scheduler", section}}.dump(), "ds_config.json").scheduler();
}

/// Two groups with lr 0.4 and 0.8, as a schedule leaves them at `iteration`.
std::vector<Hyperparameters> groups_at(const std::string& type, const Params& params, int64_t iteration) {
  const Hyperparameters adam("AdamW");
  std::vector<Hyperparameters> base{adam, adam};
  base[0].set("lr", 0.4);
  base[1].set("lr", 0.8);
  auto groups = base;
  make_schedule(scheduler_of(type, params))->apply(iteration, base, groups);
  return groups;
}

double lr_at(const std::string& type, const Params& params, int64_t iteration) {
  return groups_at(type, params, iteration)[0].lr();
}

/// `table`: iteration -> learning rate of the first group.
void expect_table(const std::string& type, const Params& params, const std::map<int64_t, double>& table) {
  for (const auto& [iteration, lr] : table) {
    EXPECT_NEAR(lr_at(type, params, iteration), lr, 1e-12) << type << " at " << iteration;
  }
}

TEST(Schedule, IsAbsentWithoutAType) { EXPECT_EQ(make_schedule(Config().scheduler()), nullptr); }

TEST(LRRangeTest, RisesFromItsMinimumFromConstructionOn) {
  const Params params{{"lr_range_test_min_lr", 0.01}, {"lr_range_test_step_size", 4}, {"lr_range_test_step_rate", 2.0}};
  expect_table("LRRangeTest", params, {{-1, 0.01}, {0, 0.015}, {1, 0.02}, {3, 0.03}, {7, 0.05}});
  Params stairs = params;
  stairs["lr_range_test_staircase"] = true;
  expect_table("LRRangeTest", stairs, {{-1, 0.01}, {0, 0.01}, {2, 0.01}, {3, 0.03}, {6, 0.03}, {7, 0.05}});
}

TEST(LRRangeTest, HasDeepSpeedsDefaults) { expect_table("LRRangeTest", {}, {{-1, 1e-3}, {1999, 2e-3}, {999, 1.5e-3}}); }

const Params kCycle{
    {"cycle_min_lr", 0.1}, {"cycle_max_lr", 0.5}, {"cycle_first_step_size", 4}, {"cycle_second_step_size", 2}};

TEST(OneCycle, RisesFallsAndStaysWithoutDecay) {
  expect_table("OneCycle", kCycle,
               {{-1, 0.1}, {0, 0.2}, {1, 0.3}, {2, 0.4}, {3, 0.5}, {4, 0.3}, {5, 0.1}, {6, 0.1}, {100, 0.1}});
}

TEST(OneCycle, DecaysAfterTheCycle) {
  Params params = kCycle;
  params["decay_lr_rate"] = 0.5;
  params["decay_step_size"] = 2;
  params["decay_mom_rate"] = 0.1;
  expect_table("OneCycle", params, {{5, 0.1}, {7, 0.1 / 1.5}, {9, 0.1 / 2.0}});
  EXPECT_NEAR(groups_at("OneCycle", params, 9)[0].get("beta1"), 0.9 * 1.2, 1e-12);
}

TEST(OneCycle, ClimbsInStairs) {
  Params params = kCycle;
  params["cycle_first_stair_count"] = 2;
  expect_table("OneCycle", params, {{0, 0.1}, {1, 0.3}, {2, 0.3}, {3, 0.5}, {4, 0.3}, {5, 0.1}});
}

TEST(OneCycle, SecondHalfIsAsLongAsTheFirstByDefault) {
  Params params = kCycle;
  params.erase("cycle_second_step_size");
  expect_table("OneCycle", params, {{3, 0.5}, {5, 0.3}, {7, 0.1}});
}

TEST(OneCycle, MovesTheFirstBetaAgainstTheRate) {
  const std::map<int64_t, double> table{{-1, 0.8}, {0, 0.875}, {3, 0.8}, {4, 0.85}, {5, 0.9}, {50, 0.9}};
  for (const auto& [iteration, momentum] : table) {
    for (const auto& group : groups_at("OneCycle", kCycle, iteration)) {
      EXPECT_NEAR(group.get("beta1"), momentum, 1e-12) << iteration;
      EXPECT_EQ(group.get("beta2"), 0.99);
    }
  }
  Params params = kCycle;
  params["cycle_momentum"] = false;
  EXPECT_EQ(groups_at("OneCycle", params, 3)[0].get("beta1"), 0.9);
  EXPECT_EQ(groups_at("OneCycle", params, 3)[0].get("beta2"), 0.999);
}

TEST(OneCycle, LeavesAnOptimizerWithoutBetasItsMomentum) {
  const Hyperparameters sgd = Hyperparameters("SGD").set("momentum", 0.7);
  std::vector<Hyperparameters> groups{sgd};
  make_schedule(scheduler_of("OneCycle", kCycle))->apply(3, {sgd}, groups);
  EXPECT_EQ(groups[0].lr(), 0.5);
  EXPECT_EQ(groups[0].get("momentum"), 0.7);
}

TEST(OneCycle, LeavesMuonsGroupsTheirMomenta) {
  const std::vector<Hyperparameters> base{Hyperparameters("Muon").set("use_muon", 1).set("momentum", 0.95),
                                          Hyperparameters("Muon").set("use_muon", 0).set("beta1", 0.8)};
  std::vector<Hyperparameters> groups = base;
  make_schedule(scheduler_of("OneCycle", kCycle))->apply(3, base, groups);
  EXPECT_EQ(groups[0].lr(), 0.5);
  EXPECT_EQ(groups[0].get("momentum"), 0.95);
  EXPECT_EQ(groups[1].lr(), 0.5);
  EXPECT_EQ(groups[1].get("beta1"), 0.8);
  EXPECT_EQ(groups[1].get("beta2"), base[1].get("beta2"));
}

TEST(WarmupLR, RisesLinearly) {
  const Params params{
      {"warmup_min_lr", 0.1}, {"warmup_max_lr", 0.5}, {"warmup_num_steps", 4}, {"warmup_type", "linear"}};
  expect_table("WarmupLR", params, {{-1, 0.1}, {0, 0.1}, {1, 0.2}, {2, 0.3}, {3, 0.4}, {4, 0.5}, {1000, 0.5}});
}

TEST(WarmupLR, RisesLogarithmicallyByDefaultAndIsThereOneStepEarly) {
  const Params params{{"warmup_min_lr", 0.1}, {"warmup_max_lr", 0.5}, {"warmup_num_steps", 8}};
  expect_table("WarmupLR", params,
               {{-1, 0.1}, {0, 0.1}, {1, 0.1 + 0.4 / 3}, {3, 0.1 + 0.8 / 3}, {7, 0.5}, {8, 0.5}, {9, 0.5}});
}

TEST(WarmupLR, GoesToEachGroupsOwnRateByDefault) {
  const auto groups = groups_at("WarmupLR", {{"warmup_num_steps", 4}, {"warmup_type", "linear"}}, 2);
  EXPECT_NEAR(groups[0].lr(), 0.2, 1e-12);
  EXPECT_NEAR(groups[1].lr(), 0.4, 1e-12);
}

TEST(WarmupLR, WarmsUpOverTwoStepsAtLeast) {
  expect_table("WarmupLR", {{"warmup_num_steps", 1}, {"warmup_max_lr", 1.0}, {"warmup_type", "linear"}},
               {{0, 0.0}, {1, 0.5}, {2, 1.0}});
}

TEST(WarmupDecayLR, FallsToZeroAtItsTotal) {
  const Params params{
      {"warmup_max_lr", 1.0}, {"warmup_num_steps", 4}, {"total_num_steps", 12}, {"warmup_type", "linear"}};
  expect_table("WarmupDecayLR", params,
               {{-1, 0.0}, {1, 0.25}, {3, 0.75}, {4, 1.0}, {6, 0.75}, {11, 0.125}, {12, 0.0}, {99, 0.0}});
}

TEST(WarmupDecayLR, HasAMaximumOfItsOwnByDefault) {
  EXPECT_NEAR(lr_at("WarmupDecayLR", {{"warmup_num_steps", 4}, {"total_num_steps", 12}}, 4), 1e-3, 1e-15);
}

TEST(WarmupCosineLR, FollowsTheCosineOfEachGroupsOwnRate) {
  const Params params{{"warmup_num_steps", 2},
                      {"total_num_steps", 6},
                      {"warmup_min_ratio", 0.5},
                      {"cos_min_ratio", 0.1},
                      {"warmup_type", "linear"}};
  const double quarter = (1 + std::sqrt(0.5)) / 2, three_quarters = (1 - std::sqrt(0.5)) / 2;
  expect_table("WarmupCosineLR", params,
               {{-1, 0.0},
                {0, 0.4 * 0.5},
                {1, 0.4 * 0.75},
                {2, 0.4 * (0.1 + 0.9 * quarter)},
                {3, 0.4 * 0.55},
                {4, 0.4 * (0.1 + 0.9 * three_quarters)},
                {5, 0.4 * 0.1},
                {50, 0.4 * 0.1}});
  EXPECT_NEAR(groups_at("WarmupCosineLR", params, 3)[1].lr(), 0.8 * 0.55, 1e-12);
}

void expect_error(const std::string& type, const Params& params, const std::string& problem) {
  try {
    scheduler_of(type, params);
    ADD_FAILURE() << type << " accepted; expected an error with: " << problem;
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("ds_config.json:1: scheduler." + problem), std::string::npos)
        << error.what();
  }
}

TEST(Schedule, IsRefusedForTypesAndParametersThatItCannotUse) {
  expect_error("StepLR", {}, "type: \"StepLR\" is torch's: give it as initialize(lr_scheduler=");
  expect_error("WarmupLR", {{"warmup_num_steps", 0}},
               "params.warmup_num_steps: expected an integer of at least 1, got 0");
  expect_error("WarmupLR", {{"warmup_num_steps", 2.5}},
               "params.warmup_num_steps: expected an integer of at least 1, got 2.5");
  expect_error("WarmupLR", {{"warmup_type", "cubic"}},
               "params.warmup_type: expected one of \"log\", \"linear\", got \"cubic\"");
  expect_error("WarmupLR", {{"warmup_steps", 3}}, "params.warmup_steps: unknown key; did you mean 'warmup_type'?");
  expect_error("WarmupLR", {{"warmup_kind", "log"}}, "params.warmup_kind: unknown key; did you mean 'warmup_min_lr'?");
  expect_error("WarmupDecayLR", {}, "params.total_num_steps: missing; expected an integer of at least 1");
  expect_error("WarmupCosineLR", {}, "params.total_num_steps: missing");
  expect_error("OneCycle", {{"cycle_max_lr", 1}}, "params.cycle_min_lr: missing; expected a number of at least 0");
  expect_error("OneCycle", {{"cycle_min_lr", 1}}, "params.cycle_max_lr: missing");
  const Params cycle = {{"cycle_min_lr", 0}, {"cycle_max_lr", 1}};
  for (const char* key :
       {"cycle_first_step_size", "cycle_second_step_size", "cycle_second_stair_count", "decay_step_size"}) {
    Params params = cycle;
    params[key] = -1;
    expect_error("OneCycle", params, std::string("params.") + key + ": expected an integer of at least ");
  }
  expect_error("LRRangeTest", {{"lr_range_test_step_size", 0}}, "params.lr_range_test_step_size: expected an integer");
}

TEST(Schedule, RefusesNumbersThatAreNotFinite) {
  const std::string text = R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e400}}})";
  EXPECT_THROW(Config::from_text(text), ConfigError);
}

}  // namespace
}  // namespace deeptide::optim
