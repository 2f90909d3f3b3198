// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The line of a step: progress, loss, rates and the time left, and only what is known.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "report/reporter.h"

namespace deeptide::report {
namespace {

StepOutcome applied(int64_t step) {
  StepOutcome outcome;
  outcome.result = StepResult::applied;
  outcome.step = step;
  outcome.grad_norm = 0.52;
  return outcome;
}

std::vector<Hyperparameters> groups(std::initializer_list<double> rates) {
  std::vector<Hyperparameters> all;
  for (const double rate : rates) all.push_back(Hyperparameters("AdamW").set("lr", rate));
  return all;
}

TEST(StepLine, ShowsProgressLossRatesAndTheTimeLeft) {
  const StepOutcome outcome = applied(1990);
  const auto rates = groups({0.001, 0.001});
  EXPECT_EQ(step_line({outcome, rates, 0, 0}, {2.3, 12000, {2.5, 7204.4}}),
            "step 1,990/12,000 | loss 2.3 | lr 0.001 | norm 0.52 | 7,204 samples/s | 1:06:44 left");
  EXPECT_EQ(step_line({outcome, rates, 0, 0}, {2.3, 2000, {0.84, 7.2}}),
            "step 1,990/2,000 | loss 2.3 | lr 0.001 | norm 0.52 | 7.2 samples/s | 0:12 left");
}

TEST(StepLine, LeavesOutWhatIsUnknown) {
  const StepOutcome outcome = applied(1);
  EXPECT_EQ(step_line({outcome, groups({0.001}), 0, 0}, {std::nan(""), 0, {}}), "step 1 | lr 0.001 | norm 0.52");
  EXPECT_EQ(step_line({outcome, groups({0.001}), 0, 0}, {1.0, 1, {1.0, 1.0}}),
            "step 1/1 | loss 1 | lr 0.001 | norm 0.52 | 1 samples/s");
}

TEST(StepLine, NamesEachRateOfGroupsThatDifferAndWhatWasSkipped) {
  StepOutcome outcome = applied(3);
  outcome.result = StepResult::non_finite;
  outcome.reason = "non-finite gradient";
  EXPECT_EQ(step_line({outcome, groups({0.001, 0.01}), 0, 2}, {std::nan(""), 0, {}}),
            "step 3 | lr 0.001, 0.01 | norm 0.52 | 2 skipped | non-finite gradient");
}

TEST(StepRate, LeavesTheFirstStepOutAndBeginsAnewWithEachLine) {
  using std::chrono::seconds;
  const StepRate::Clock::time_point start;
  StepRate rate;
  rate.end_step(8, start);
  EXPECT_EQ(rate.take(start + seconds(1)).steps_per_s, 0.0);
  rate.end_step(16, start + seconds(2));
  rate.end_step(24, start + seconds(4));
  const auto first = rate.take(start + seconds(4));
  EXPECT_EQ(first.steps_per_s, 0.5);
  EXPECT_EQ(first.samples_per_s, 4.0);
  EXPECT_EQ(rate.take(start + seconds(5)).samples_per_s, 0.0);
  rate.end_step(34, start + seconds(6));
  EXPECT_EQ(rate.take(start + seconds(6)).samples_per_s, 5.0);
}

}  // namespace
}  // namespace deeptide::report
