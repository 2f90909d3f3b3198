// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each cause is named, with its rank and its cure.
#include "report/limit.h"

#include <gtest/gtest.h>

namespace deeptide::report {
namespace {

/// A rank of a step of 1 s that only computes.
StepTimes computing() { return {.total = 1.0f, .forward = 0.3f, .backward = 0.6f, .step = 0.1f, .optimizer = 0.05f}; }

LimitFacts even(size_t ranks) {
  LimitFacts facts;
  facts.times.assign(ranks, computing());
  for (size_t i = 0; i < ranks; ++i) facts.ranks.push_back(static_cast<int>(10 + i));
  return facts;
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST(Limit, IsComputingWhereNothingElseIs) {
  LimitFacts facts = even(2);
  facts.flops_share = 0.43;
  facts.memory_bound = 0.2;
  const LimitFound found = find_limit(facts);
  EXPECT_EQ(found.limit, Limit::compute);
  EXPECT_TRUE(has(found.text, "43 %") && has(found.text, "bf16")) << found.text;
}

TEST(Limit, IsMemoryWhereMostOperatorsMoveMoreThanTheyCompute) {
  LimitFacts facts = even(1);
  facts.memory_bound = 0.8;
  facts.triad = 50e9;
  facts.bytes_per_s = 40e9;
  const LimitFound found = find_limit(facts);
  EXPECT_EQ(found.limit, Limit::memory);
  EXPECT_TRUE(has(found.text, "GiB/s")) << found.text;
}

TEST(Limit, NamesTheRankForWhichTheOthersWait) {
  LimitFacts facts = even(4);
  for (size_t i = 0; i < 4; ++i) facts.times[i].waiting = i == 2 ? 0.0f : 0.3f;
  const LimitFound found = find_limit(facts);
  EXPECT_EQ(found.limit, Limit::late_rank);
  EXPECT_EQ(found.rank, 12);
  EXPECT_TRUE(has(found.text, "waiting for rank 12, which computes for 1 s (others 0.7 s)")) << found.text;
}

TEST(Limit, SaysWhyThatRankIsLate) {
  LimitFacts facts = even(2);
  facts.times[0].waiting = 0.4f;
  facts.times[1].between = 0.4f;
  EXPECT_TRUE(has(find_limit(facts).text, "rank 11, which spends 0.4 s between steps (others 0 s): look at its data"))
      << find_limit(facts).text;
  facts.times[1].between = 0.0f;
  facts.times[1].files = 0.4f;
  EXPECT_TRUE(has(find_limit(facts).text, "rank 11, which waits 0.4 s for files (others 0 s): look at its drive"))
      << find_limit(facts).text;
}

TEST(Limit, IsTheNetworkWhereAllRanksWaitAlike) {
  LimitFacts facts = even(2);
  for (StepTimes& times : facts.times) times.waiting = 0.5f;
  facts.slow_link = "from rank 10 on a to rank 11 on b";
  const LimitFound found = find_limit(facts);
  EXPECT_EQ(found.limit, Limit::network);
  EXPECT_TRUE(has(found.text, "slow from rank 10 on a to rank 11 on b")) << found.text;
}

TEST(Limit, IsWaitingForOtherStagesInAPipeline) {
  for (const size_t ranks : {1, 2}) {
    LimitFacts facts = even(ranks);
    facts.has_stages = true;
    EXPECT_EQ(find_limit(facts).limit, Limit::compute);
    for (StepTimes& times : facts.times) times.waiting = 0.5f;
    const LimitFound found = find_limit(facts);
    EXPECT_EQ(found.limit, Limit::stages);
    EXPECT_TRUE(has(found.text, "limited by waiting: 0.5 s of a step wait for other stages")) << found.text;
    EXPECT_TRUE(has(found.text, "compute 50 %, waiting 50 %, files 0 %")) << found.text;
  }
}

TEST(Limit, IsFilesOrDataOnAllRanks) {
  LimitFacts facts = even(1);
  facts.times[0].files = 0.3f;
  EXPECT_EQ(find_limit(facts).limit, Limit::files);
  facts.times[0].between = 0.4f;
  const LimitFound found = find_limit(facts);
  EXPECT_EQ(found.limit, Limit::data);
  EXPECT_TRUE(has(found.text, "files 30 %, data 40 %")) << found.text;
}

TEST(Limit, IsUnknownOfNoTime) {
  EXPECT_EQ(find_limit({}).text, "");
  EXPECT_EQ(find_limit({.times = {StepTimes()}, .ranks = {0}}).text, "");
}

}  // namespace
}  // namespace deeptide::report
