// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares a step's exchanges with their forecast. That engines take as much: tests/python/engine/plan/test_plan.py.
#include "zero/steps/step_forecast.h"

#include <gtest/gtest.h>

#include "zero/transfers/unit_gathers.h"

namespace deeptide::zero {
namespace {

int64_t of_stage(int stage, const std::string& type, const std::vector<int64_t>& numels, int num_ranks = 2) {
  const auto& rule = optim::find_rule(type);
  std::vector<UnitForecast> units;
  for (const int64_t numel : numels) {
    units.push_back({stage == 0 ? numel : numel / num_ranks, numel, at::kFloat, {0}});
  }
  return forecast_step(units, rule, {Hyperparameters(type)}, kStages[stage], num_ranks);
}

TEST(StepForecast, CountsGradientsThatAreGatheredAtOnce) {
  constexpr int64_t kRoom = kBytesUnderWay / 4;  // elements
  EXPECT_EQ(of_stage(0, "Adam", {}), 0);
  EXPECT_EQ(of_stage(0, "Adam", {100, 300, 200}), 4 * 600) << "all are under way";
  EXPECT_EQ(of_stage(0, "Adam", {kRoom, 3 * kRoom, kRoom}), 12 * kRoom) << "one at a time, the others' memory is freed";
  EXPECT_EQ(of_stage(0, "Adam", {kRoom / 2, kRoom, kRoom / 2}), 6 * kRoom);
  EXPECT_EQ(of_stage(0, "Adam", {100, 300}, 1), 0);
  EXPECT_EQ(of_stage(1, "Adam", {100, 300}), 0) << "each steps its shard";
}

TEST(StepForecast, CountsDirectionsOfMatrices) {
  EXPECT_EQ(of_stage(1, "Muon", {1000}), 2 * 500 + 2 * 1000);
  EXPECT_EQ(of_stage(0, "Muon", {1000}, 1), 2 * 1000) << "its own direction is the whole one";
}

}  // namespace
}  // namespace deeptide::zero
