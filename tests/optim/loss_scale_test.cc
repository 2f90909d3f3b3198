// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The loss scale walks as DeepSpeed's users know it, for each setting.
#include "optim/loss_scale.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace deeptide::optim {
namespace {

using Scales = std::vector<double>;

PrecisionConfig fp16(int64_t window, int64_t hysteresis) {
  PrecisionConfig config;
  config.fp16 = true;
  config.initial_scale_power = 4;
  config.loss_scale_window = window;
  config.hysteresis = hysteresis;
  return config;
}

/// The scale after each step of `steps`: '.' is a good one, 'x' overflows.
Scales walk(const PrecisionConfig& config, const std::string& steps) {
  Scales scales;
  LossScale now = initial_loss_scale(config);
  for (const char step : steps) scales.push_back((now = next_loss_scale(config, now, step == 'x')).scale);
  return scales;
}

TEST(LossScale, StartsAtTwoToThePowerAndIsOneWithoutFp16) {
  EXPECT_EQ(initial_loss_scale(fp16(2, 1)).scale, 16.0);
  EXPECT_EQ(initial_loss_scale(PrecisionConfig()).scale, 1.0);
  EXPECT_EQ(walk(PrecisionConfig(), "xx."), (Scales{1, 1, 1}));
}

TEST(LossScale, GrowsAfterEachWindowOfGoodSteps) {
  EXPECT_EQ(walk(fp16(2, 1), "......."), (Scales{16, 16, 32, 32, 64, 64, 128}));
  EXPECT_EQ(walk(fp16(2, 1), "..x...."), (Scales{16, 16, 8, 8, 8, 16, 16})) << "the window begins anew";
}

TEST(LossScale, ShrinksAtEachOverflowDownToTheMinimum) {
  auto config = fp16(1000, 1);
  config.min_loss_scale = 2;
  EXPECT_EQ(walk(config, "xxxxx"), (Scales{8, 4, 2, 2, 2}));
}

TEST(LossScale, ForgivesAsManyOverflowsAsTheHysteresisSays) {
  EXPECT_EQ(walk(fp16(1000, 3), "xx.xx"), (Scales{16, 16, 16, 8, 4})) << "spent, and not yet restored";
  EXPECT_EQ(walk(fp16(2, 2), "x...xx"), (Scales{16, 16, 16, 32, 32, 16})) << "a window restores it";
}

TEST(LossScale, RestoresTheHysteresisAtAnyGoodStepIfThatIsConsecutive) {
  auto config = fp16(1000, 2);
  config.consecutive_hysteresis = true;
  EXPECT_EQ(walk(config, "x.x.xx"), (Scales{16, 16, 16, 16, 16, 8}));
}

TEST(LossScale, StaysWhereItIsFixed) {
  auto config = fp16(1, 1);
  config.loss_scale = 128;
  EXPECT_EQ(walk(config, "..xx.."), Scales(6, 128.0));
}

}  // namespace
}  // namespace deeptide::optim
