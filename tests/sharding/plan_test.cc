// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The prediction follows a pass, and skips, wraps and ends with the model.
#include "sharding/plan.h"

#include <gtest/gtest.h>

namespace deeptide::sharding {
namespace {

using Units = std::vector<int>;

/// Units of 10, 20, 40, 80 … elements.
std::vector<int64_t> sizes(int count) {
  std::vector<int64_t> numels;
  for (int i = 0; i < count; ++i) numels.push_back(int64_t{10} << i);
  return numels;
}

void pass(Plan& plan, const Units& units) {
  for (int unit : units) plan.visit(unit);
  plan.finish_pass();
}

TEST(Plan, StartsWithModuleOrderThereAndBack) {
  EXPECT_EQ(Plan(sizes(3), true).order(), (Units{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(Plan(sizes(3), false).order(), (Units{0, 1, 2}));
  EXPECT_FALSE(Plan(sizes(3), true).recorded());
  EXPECT_EQ(Plan(sizes(3), true).upcoming(2), (Units{0, 1}));
}

TEST(Plan, PredictsThePassBeforeWithRepeatsInARowOnce) {
  Plan plan(sizes(4), true);
  pass(plan, {2, 2, 2, 0, 0, 2, 1});
  EXPECT_TRUE(plan.recorded());
  EXPECT_EQ(plan.order(), (Units{2, 0, 2, 1}));
  EXPECT_EQ(plan.upcoming(10), (Units{2, 0, 1})) << "distinct, nearest first";
}

TEST(Plan, FollowsThePassWithItsCursor) {
  Plan plan(sizes(3), true);
  pass(plan, {0, 1, 2, 1, 0});
  plan.visit(0);
  EXPECT_EQ(plan.upcoming(1), Units{1});
  EXPECT_EQ(plan.distance(1), 1);
  EXPECT_EQ(plan.distance(0), 4);
  plan.visit(1);
  plan.visit(2);
  EXPECT_EQ(plan.upcoming(10), (Units{1, 0}));
  EXPECT_EQ(plan.distance(2), std::nullopt) << "not again in this pass";
}

TEST(Plan, SkipsAheadWhenABlockIsLeftOut) {
  Plan plan(sizes(4), false);
  pass(plan, {0, 1, 2, 3});
  plan.visit(0);
  plan.visit(2);
  EXPECT_EQ(plan.upcoming(10), Units{3});
}

TEST(Plan, WrapsRoundForALoopWithoutStep) {
  Plan plan(sizes(3), false);
  pass(plan, {0, 1, 2});
  for (int unit : {0, 1, 2, 0}) plan.visit(unit);
  EXPECT_EQ(plan.upcoming(10), (Units{1, 2}));
}

TEST(Plan, StaysWhereItIsAtAnUnknownUnit) {
  Plan plan(sizes(5), false);
  pass(plan, {0, 1, 2});
  plan.visit(1);
  plan.visit(4);
  EXPECT_EQ(plan.upcoming(10), Units{2});
  plan.finish_pass();
  EXPECT_EQ(plan.order(), (Units{1, 4})) << "but it learns it";
}

TEST(Plan, KeepsItsPredictionOverAnEmptyPass) {
  Plan plan(sizes(3), false);
  pass(plan, {2, 1});
  plan.finish_pass();
  EXPECT_EQ(plan.order(), (Units{2, 1}));
}

TEST(Plan, CountsTheElementsOnTheWay) {
  Plan plan(sizes(4), false);
  pass(plan, {0, 1, 2, 3, 0});
  plan.visit(0);
  EXPECT_EQ(plan.elements_until(1), 0);
  EXPECT_EQ(plan.elements_until(3), 20 + 40);
  EXPECT_EQ(plan.elements_until(0), 20 + 40 + 80);
  plan.visit(2);
  EXPECT_EQ(plan.elements_until(1), std::nullopt);
}

TEST(Plan, StopsRecordingAPassWithoutEnd) {
  Plan plan(sizes(2), false);
  for (int i = 0; i < 100'000; ++i) plan.visit(i % 2);
  plan.finish_pass();
  EXPECT_LE(plan.order().size(), 64u + 64u * 2);
}

}  // namespace
}  // namespace deeptide::sharding
