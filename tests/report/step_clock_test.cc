// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of a step, and what does not count twice.
#include "report/step_clock.h"

#include <gtest/gtest.h>

namespace deeptide::report {
namespace {

using trace::Phase;
using trace::Work;

void pass(StepClock& clock, Work work, Phase phase, int64_t ms) {
  clock.end({.work = work,
             .phase = phase,
             .name = "",
             .channel = "",
             .begin_ns = 0,
             .end_ns = ms * 1'000'000,
             .in_turn = true});
}

TEST(StepClock, LeavesWaitsOfASaveToTheTimeBetweenSteps) {
  StepClock clock;
  pass(clock, Work::wait, Phase::between, 30);
  pass(clock, Work::file, Phase::between, 10);
  pass(clock, Work::phase, Phase::between, 100);
  pass(clock, Work::wait, Phase::forward, 2);
  pass(clock, Work::phase, Phase::forward, 20);
  const StepTimes times = clock.take();
  EXPECT_FLOAT_EQ(times.between, 0.1f);
  EXPECT_FLOAT_EQ(times.waiting, 0.002f);
  EXPECT_FLOAT_EQ(times.files, 0.0f);
  EXPECT_NEAR(times.computing(), 0.018, 1e-6);
  EXPECT_FLOAT_EQ(clock.take().total, 0.0f);
}

TEST(StepClock, CountsWaitsOfAForwardThatNobodyAnnounced) {
  StepClock clock;
  pass(clock, Work::wait, Phase::between, 30);
  pass(clock, Work::phase, Phase::forward, 100);
  EXPECT_FLOAT_EQ(clock.take().waiting, 0.03f);
}

}  // namespace
}  // namespace deeptide::report
