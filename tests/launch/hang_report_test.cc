// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hang reports from made-up states, and from real processes that hang.
#include "launch/hang_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/launched.h"
#include "launch/rank_stacks.h"

namespace deeptide::launch {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

RankState rank_at(int rank, uint64_t newest, bool waits) {
  RankState state;
  state.rank = rank;
  state.pid = 1000 + rank;
  state.process = 'S';
  state.step = 7;
  state.phase = "backward";
  state.module = "h.12.mlp";
  state.newest["reductions"] = newest;
  state.newest_operation["reductions"] = "reduce-scatter";
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
  EXPECT_TRUE(has(report, "rank 2 is gone; it is in backward")) << report;
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

TEST(RankState, TravelsAsText) {
  RankState state = rank_at(3, 314, true);
  state.host = "worker-2";
  state.stacks = "a \"quoted\"\nline\t\\";
  const RankState back = state_from_json(to_json(state));
  EXPECT_EQ(to_json(back), to_json(state));
  EXPECT_EQ(back.waiting->sequence, 314u);
  EXPECT_EQ(back.stacks, state.stacks);
  EXPECT_FALSE(state_from_json(to_json(rank_at(3, 310, false))).waiting);
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

TEST(LiveJob, IsListedAndShowsItsStacksUntilItEnds) {
  Launched job = hanging("0");
  const std::string number = std::to_string(job.pid());
  ASSERT_TRUE(eventually([&] { return pid_of(job.output_so_far(), 3) > 0; }));
  const std::string list = launch({"ps"}).output;
  EXPECT_TRUE(has(list, number + "\t4\t7\t")) << list;
  EXPECT_TRUE(has(list, "2\n")) << list;
  const std::string stacks = launch({"stacks", number}).output;
  EXPECT_TRUE(has(stacks, kLate)) << stacks;
  EXPECT_TRUE(has(stacks, "compute_for_ever in ")) << stacks;
  job.send_signal(SIGKILL);
  job.wait();
  EXPECT_FALSE(has(launch({"ps"}).output, number + "\t"));
  EXPECT_TRUE(has(launch({"stacks", number}).errors, "no live job")) << "it has ended";
}

}  // namespace
}  // namespace deeptide::launch
