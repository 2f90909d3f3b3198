// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hang reports from made-up states, and from real processes that hang.
#include "launch/watch/hang_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "launch/launched.h"
#include "launch/watch/rank_stacks.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {
namespace {

RankState rank_at(int rank, uint64_t newest, bool waits) {
  RankState state;
  state.rank = rank;
  state.pid = 1000 + rank;
  state.process = 'S';
  state.step = 7;
  state.phase = "backward";
  state.module = "h.12.mlp";
  state.newest["reductions"] = {newest, "reduce-scatter"};
  if (waits) {
    state.waiting =
        CollectiveState{"reduce-scatter", "reductions", "backward", "h.11", "h.11.w", 7, 3 << 20, newest, 12.5};
  }
  return state;
}

TEST(RankList, JoinsNeighbours) {
  EXPECT_EQ(rank_list({}), "");
  EXPECT_EQ(rank_list({5}), "5");
  EXPECT_EQ(rank_list({4, 3}), "3, 4");
  EXPECT_EQ(rank_list({0, 1, 2, 4, 6, 7, 8}), "0-2, 4, 6-8");
}

TEST(HangReport, PutsTheLateRankFirstAndMergesTheOthers) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 8; ++rank) states.push_back(rank_at(rank, rank == 5 ? 310 : 314, rank != 5));
  EXPECT_EQ(hang_report(states),
            "rank 5 is in backward of h.12.mlp at step 7; its last in 'reductions' is reduce-scatter 310; the others "
            "are at 314\n"
            "ranks 0-4, 6, 7 waiting for reduce-scatter 314 of h.11 (3.0 MiB), in backward at step 7, for 12.5 s\n");
}

TEST(HangReport, NamesTheCoordinatesOfARankAlone) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 8; ++rank) {
    states.push_back(rank_at(rank, rank == 5 ? 310 : 314, rank != 5));
    states.back().mesh = {2, 2, 1, 1, 2};
  }
  states[5].stacks = "in forget_to_train";
  const std::string report = hang_report(decode<StateAnswer>(encode(StateAnswer{1, states})).states);
  EXPECT_TRUE(report.starts_with("rank 5 (pipeline 1, data 0, tensor 1) is in backward")) << report;
  EXPECT_TRUE(has(report, "  rank 5 (pipeline 1, data 0, tensor 1), process 1005:")) << report;
  EXPECT_TRUE(has(report, "\nranks 0-4, 6, 7 waiting for ")) << report;
}

TEST(HangReport, TellsALateRankThatWaitsElsewhere) {
  std::vector<RankState> states{rank_at(0, 314, true), rank_at(1, 310, false)};
  states[1].waiting = CollectiveState{"all-gather", "gathers", "backward", "h.3", "h.3.w", 7, 4096, 90, 3.0};
  EXPECT_TRUE(
      has(hang_report(states),
          "rank 1 is in backward of h.12.mlp at step 7, waiting for all-gather 90 of h.3; the others are at 314"));
}

TEST(HangReport, SaysThatARankIsStoppedOrGone) {
  std::vector<RankState> states{rank_at(0, 314, true), rank_at(1, 310, false), rank_at(2, 310, false)};
  states[1].process = 'T';
  states[2].process = 'X';
  const std::string report = hang_report(states);
  EXPECT_TRUE(has(report, "rank 1 is stopped (SIGSTOP or a debugger) and is in backward")) << report;
  EXPECT_TRUE(has(report, "rank 2 is gone; it was in backward")) << report;
  states[1].process = states[2].process = 'Z';
  EXPECT_TRUE(
      has(hang_report(states), "ranks 1, 2 have ended; they were in backward of h.12.mlp at step 7; their last "))
      << hang_report(states);
  EXPECT_EQ(ranks_to_show(states), (std::vector<int>{0})) << "the dead have no stacks";
}

TEST(HangReport, ShowsStacksOfTheLateAndOfOneThatWaits) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 30; ++rank) states.push_back(rank_at(rank, rank >= 20 ? 310 : 314, rank < 20));
  const std::vector<int> shown = ranks_to_show(states);
  EXPECT_EQ(shown, (std::vector<int>{20, 21, 22, 23, 24, 25, 26, 27, 0}));
  states[0].stacks = "frame one\nframe two\n";
  EXPECT_TRUE(has(hang_report(states), "  rank 0, process 1000:\n    frame one\n    frame two\n"));
}

TEST(HangReport, CountsOnlyWaitsAsLate) {
  EXPECT_EQ(longest_wait({rank_at(0, 5, false), rank_at(1, 9, false)}), 0.0);
  EXPECT_EQ(longest_wait({rank_at(0, 5, true), rank_at(1, 9, false)}), 12.5);
  EXPECT_EQ(longest_wait({}), 0.0);
}

TEST(HangReport, NamesTheHostsOfAGroup) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 8; ++rank) {
    states.push_back(rank_at(rank, rank < 6 ? 314 : 310, rank < 6));
    states.back().host = "worker-" + std::to_string(1 + rank / 2);
    if (rank >= 6) states.back().process = 'T';
  }
  const std::string report = hang_report(states);
  EXPECT_TRUE(has(report, "ranks 6, 7 on worker-4 are stopped (SIGSTOP or a debugger) and are in backward")) << report;
  EXPECT_TRUE(has(report, "ranks 0-5 on worker-1, worker-2, worker-3 waiting for")) << report;
  for (RankState& state : states) state.host += std::to_string(state.rank);
  EXPECT_TRUE(has(hang_report(states), "ranks 0-5 on 6 hosts waiting for")) << hang_report(states);
}

TEST(HangReport, NamesTheSlowLinkWhereverItIsKnown) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 6; ++rank) {
    states.push_back(rank_at(rank, 314, true));
    states.back().host = "worker-" + std::to_string(1 + rank / 2);
  }
  EXPECT_FALSE(has(hang_report(states), "slow link"));
  states[4].slow_link = {.from = 5, .to = 1, .bytes_per_s = 6 << 20, .others = 12 << 20};
  const std::string line =
      "slow link so far: from rank 5 on worker-3 to rank 1 on worker-1, 6.0 MiB/s (others 12.0 MiB/s)\n";
  EXPECT_TRUE(has(hang_report(states), line)) << hang_report(states);
  auto arrived = decode<StateAnswer>(encode(StateAnswer{7, states})).states;  // all in one place
  ASSERT_EQ(arrived.size(), 6U);
  for (RankState& state : arrived) state.host = "worker-" + std::to_string(1 + state.rank / 2);
  EXPECT_TRUE(has(hang_report(arrived), line)) << hang_report(arrived);
}

TEST(HangReport, BlamesAStoppedRankThatHasIssuedAll) {
  std::vector<RankState> states{rank_at(0, 314, true), rank_at(1, 314, true)};
  states[1].process = 'T';
  const std::string report = hang_report(states);
  EXPECT_EQ(report.find("rank 1 is stopped (SIGSTOP or a debugger) and is in backward"), 0u) << report;
  EXPECT_TRUE(has(report, "rank 0 waiting for")) << report;
}

TEST(HangReport, BlamesNobodyWhenAllHaveIssuedAll) {
  const std::string report = hang_report({rank_at(0, 314, true), rank_at(1, 314, true)});
  EXPECT_EQ(report.find("ranks 0, 1 waiting for reduce-scatter 314"), 0u) << report;
  EXPECT_TRUE(has(report, "the transport between the ranks makes no progress")) << report;
}

TEST(HangReport, SaysWhatACollectiveIsForIfItServesNoUnit) {
  std::vector<RankState> states{rank_at(0, 314, true), rank_at(1, 310, false)};
  states[0].waiting->unit = "waiting for all ranks";
  EXPECT_TRUE(has(hang_report(states), "rank 0 waiting for reduce-scatter 314: waiting for all ranks (3.0 MiB), in "));
}

// Rank 0 waits for rank 1, which waits in another channel for rank 2, which computes: rank 2 is the cause.
TEST(HangReport, FollowsTheWaitsToTheirCause) {
  std::vector<RankState> states{rank_at(0, 314, true), rank_at(1, 310, false), rank_at(2, 314, true)};
  for (RankState& state : states) state.newest["gathers"] = {90, "all-gather"};
  states[1].waiting = CollectiveState{"all-gather", "gathers", "backward", "h.3", "h.3.w", 7, 4096, 90, 3.0};
  states[2].newest["gathers"].sequence = 89;
  states[2].waiting.reset();
  const std::string report = hang_report(states);
  EXPECT_EQ(report.find("rank 2 is in backward of h.12.mlp at step 7; its last in 'gathers' is all-gather 89; the "
                        "others are at 90\n"),
            0u)
      << report;
  EXPECT_LT(report.find("rank 1 is in backward"), report.find("rank 0 waiting")) << report;
}

// Each engine's channels, and so each group's, count for themselves.
TEST(HangReport, ComparesNumbersOfOneChannelOnly) {
  std::vector<RankState> states{rank_at(0, 4, true), rank_at(1, 3, false), rank_at(2, 4, true)};
  states[1].newest["gathers"] = {1000, "all-gather"};
  EXPECT_EQ(ranks_to_show(states), (std::vector<int>{1, 0}));
  EXPECT_EQ(hang_report(states).find("rank 1 is in backward"), 0u) << hang_report(states);
}

TEST(HangReport, IsBoundedHoweverManyPlacesThereAre) {
  std::vector<RankState> states;
  for (int rank = 0; rank < 1000; ++rank) {
    states.push_back(rank_at(rank, 314, true));
    states.back().waiting->unit = "h." + std::to_string(rank);
  }
  const std::string report = hang_report(states);
  EXPECT_EQ(std::count(report.begin(), report.end(), '\n'), 66) << report;
  EXPECT_TRUE(has(report, "and 936 more groups\n"));
  EXPECT_EQ(ranks_to_show(states).size(), 8u);
}

TEST(StateAnswer, TravelsAsBytesRanksInTheSamePlaceOnce) {
  StateAnswer answer{7, {rank_at(3, 314, true), rank_at(4, 310, false), rank_at(5, 314, true)}};
  answer.states[0].stacks = answer.states[2].stacks = "a \"quoted\"\nline\t\\ \xff";
  answer.states[2].waiting->waited_s = 13.0;
  const StateAnswer back = decode<StateAnswer>(encode(answer));
  EXPECT_EQ(back.id, 7u);
  ASSERT_EQ(back.states.size(), 3u);
  std::map<int, RankState> by_rank;
  for (const RankState& state : back.states) by_rank[state.rank] = state;
  EXPECT_EQ(by_rank[3].waiting->sequence, 314u);
  EXPECT_EQ(by_rank[3].waiting->waited_s, 13.0) << "the longest of those in the same place";
  EXPECT_EQ(by_rank[5].stacks, answer.states[0].stacks);
  EXPECT_FALSE(by_rank[4].waiting);
  EXPECT_EQ(by_rank[4].pid, 1004) << "alone in its place";
  EXPECT_EQ(by_rank[4].newest["reductions"].sequence, 310u);
  StateAnswer many{1, {}};
  for (int rank = 0; rank < 8; ++rank) many.states.push_back(rank_at(rank, 314, true));
  EXPECT_LT(encode(many).size(), 350u) << "a host of eight ranks in one place";
  EXPECT_THROW(decode<StateAnswer>("{}"), std::exception);
}

TEST(Frame, IsReadable) {
  EXPECT_EQ(readable_frame("/a/b/libx.so.1(_ZN3foo3barEi+0x12) [0x7f]"), "foo::bar(int) in libx.so.1");
  EXPECT_EQ(readable_frame("/lib/libc.so.6(pause+0x1) [0x7f]"), "pause in libc.so.6");
  EXPECT_EQ(readable_frame("/lib/libc.so.6(+0x89abc) [0x7f]"), "+0x89abc in libc.so.6");
  EXPECT_EQ(readable_frame("[0x7f]"), "[0x7f]");
}

/// Four ranks of which number 2 is late.
Launched hanging(const std::string& timeout) {
  return Launched({"--num_ranks", "4", "--hang_timeout", timeout, "--no_python", FLIGHT_RANK, "2"});
}

pid_t pid_of(const std::string& output, int rank) {
  const std::string mark = "[rank " + std::to_string(rank) + "] pid ";
  const size_t at = output.find(mark);
  return at == std::string::npos ? 0 : std::atoi(output.c_str() + at + mark.size());
}

const std::string kLate =
    "rank 2 is in backward of h.12.mlp at step 7; its last in 'reductions' is reduce-scatter 310; the others are at "
    "314";

TEST(Hang, IsReportedOnceWithTheStacksOfTheLateRank) {
  Launched job = hanging("0.5");
  ASSERT_TRUE(eventually([&] { return has(job.errors_so_far(), "ranks 0, 1, 3 waiting for reduce-scatter 314"); }))
      << job.errors_so_far();
  sleep_briefly();
  job.send_signal(SIGTERM);
  const std::string output = job.wait().errors;
  EXPECT_TRUE(has(output, kLate)) << output;
  EXPECT_TRUE(has(output, "compute_for_ever in ")) << output;
  EXPECT_EQ(output.find(kLate), output.rfind(kLate)) << "reported again: " << output;
}

TEST(Hang, OfAStoppedRankIsReportedWithWhatTheKernelKnows) {
  Launched job = hanging("2");
  ASSERT_TRUE(eventually([&] { return pid_of(job.output_so_far(), 2) > 0; }));
  ASSERT_EQ(::kill(pid_of(job.output_so_far(), 2), SIGSTOP), 0);
  ASSERT_TRUE(eventually([&] { return has(job.errors_so_far(), "rank 2 is stopped (SIGSTOP or a debugger)"); }))
      << job.errors_so_far();
  EXPECT_TRUE(eventually([&] { return has(job.errors_so_far(), "system call"); })) << job.errors_so_far();
  job.send_signal(SIGTERM);
  job.wait();
}

TEST(Hang, DoesNotCountTheTimeForWhichTheJobWasPaused) {
  Launched job = hanging("2");
  ASSERT_TRUE(eventually([&] { return pid_of(job.output_so_far(), 3) > 0; }));
  job.send_signal(SIGTSTP);
  ASSERT_TRUE(eventually([&] { return is_stopped(job.pid()); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  job.send_signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_FALSE(has(job.errors_so_far(), "state of the ranks")) << job.errors_so_far();
  EXPECT_TRUE(eventually([&] { return has(job.errors_so_far(), "state of the ranks"); }));
  job.send_signal(SIGTERM);
  job.wait();
}

TEST(LiveJob, IsListedAndShowsItsStacksUntilItEnds) {
  Launched job = hanging("0");
  const std::string number = std::to_string(job.pid());
  ASSERT_TRUE(eventually([&] { return pid_of(job.output_so_far(), 3) > 0; }));
  const std::string list = launch({"ps"}).output;
  EXPECT_TRUE(has(list, number + "\t1\t4\t7\t")) << list;
  EXPECT_TRUE(has(list, "2\n")) << list;
  const std::string stacks = launch({"stacks", number}).output;
  EXPECT_TRUE(has(stacks, kLate)) << stacks;
  EXPECT_TRUE(has(stacks, "compute_for_ever in ")) << stacks;
  job.send_signal(SIGKILL);
  job.wait();
  EXPECT_TRUE(eventually([&] { return !has(launch({"ps"}).output, number + "\t"); })) << "its supervisor outlives it";
  EXPECT_TRUE(has(launch({"stacks", number}).errors, "no live job")) << "it has ended";
}

}  // namespace
}  // namespace deeptide::launch
