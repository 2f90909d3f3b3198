// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The end of processes without processes: which deadline leads to what.
#include "launch/process/ending.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Due = Ending::Due;
using Phase = Ending::Phase;

const Ending::Time kStart = Ending::Time() + seconds(1000);
constexpr milliseconds kMoment{1};

TEST(Ending, DoesNothingBeforeItIsAsked) {
  Ending ending;
  EXPECT_EQ(ending.check(kStart), Due::nothing);
  EXPECT_EQ(ending.phase(), Phase::running);
  EXPECT_FALSE(ending.asked());
  EXPECT_FALSE(ending.deadline().has_value());
}

TEST(Ending, KillsWhatOutlastsTheGrace) {
  Ending ending;
  EXPECT_TRUE(ending.stop(kStart, {SIGINT, 2.0}));
  EXPECT_TRUE(ending.asked());
  EXPECT_EQ(ending.deadline(), kStart + seconds(2));
  EXPECT_EQ(ending.check(kStart + seconds(2) - kMoment), Due::nothing);
  EXPECT_EQ(ending.check(kStart + seconds(2)), Due::kill);
  EXPECT_EQ(ending.phase(), Phase::killing);
  EXPECT_FALSE(ending.deadline().has_value()) << "nothing is left to do";
  EXPECT_EQ(ending.check(kStart + seconds(200)), Due::nothing);
}

TEST(Ending, LeavesAMomentForLastWordsAfterAFailure) {
  Ending ending;
  ending.warn(kStart, {SIGTERM, 5.0});
  EXPECT_EQ(ending.phase(), Phase::warned);
  EXPECT_FALSE(ending.asked()) << "those that end now end by themselves";
  ending.warn(kStart + kMoment, {SIGINT, 1.0});
  EXPECT_EQ(ending.deadline(), kStart + kLastWords) << "the first failure counts";
  EXPECT_EQ(ending.check(kStart + kLastWords - kMoment), Due::nothing);
  const Ending::Time asked = kStart + kLastWords + kMoment;
  EXPECT_EQ(ending.check(asked), Due::stop);
  EXPECT_EQ(ending.request().signal, SIGTERM);
  EXPECT_EQ(ending.request().grace_s, 5.0);
  EXPECT_EQ(ending.deadline(), asked + seconds(5)) << "the grace begins when they are asked";
  EXPECT_EQ(ending.check(asked + seconds(5)), Due::kill);
}

TEST(Ending, IsNotDelayedByAWarning) {
  Ending ending;
  ending.warn(kStart, {SIGTERM, 5.0});
  EXPECT_TRUE(ending.stop(kStart + kMoment, {SIGINT, 1.0}));
  EXPECT_EQ(ending.request().signal, SIGINT);
  ending.warn(kStart + 2 * kMoment, {SIGTERM, 5.0});
  EXPECT_EQ(ending.phase(), Phase::stopping) << "a warning after the request has no effect";
  EXPECT_EQ(ending.check(kStart + kLastWords), Due::nothing) << "nobody is asked twice";
  EXPECT_EQ(ending.check(kStart + kMoment + seconds(1)), Due::kill);
}

TEST(Ending, RestartsTheGraceWhenAskedAgainButNeverTurnsBack) {
  Ending ending;
  ending.stop(kStart, {SIGINT, 2.0});
  EXPECT_TRUE(ending.stop(kStart + seconds(1), {SIGTERM, 5.0}));
  EXPECT_EQ(ending.deadline(), kStart + seconds(6));
  ending.kill(kStart + seconds(2));
  EXPECT_FALSE(ending.stop(kStart + seconds(3), {SIGTERM, 5.0}));
  EXPECT_EQ(ending.phase(), Phase::killing);
}

TEST(Ending, GivesUpWhereItsOwnerHasALimit) {
  Ending ending({.slack = seconds(3), .kill = seconds(4)});
  ending.stop(kStart, {SIGTERM, 1.0});
  EXPECT_EQ(ending.check(kStart + seconds(1)), Due::nothing) << "agents kill at the end of the grace themselves";
  EXPECT_EQ(ending.check(kStart + seconds(4)), Due::kill);
  EXPECT_EQ(ending.deadline(), kStart + seconds(8));
  EXPECT_EQ(ending.check(kStart + seconds(8) - kMoment), Due::nothing);
  EXPECT_EQ(ending.check(kStart + seconds(8)), Due::give_up);
}

}  // namespace
}  // namespace deeptide::launch
