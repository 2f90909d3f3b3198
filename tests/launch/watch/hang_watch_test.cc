// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One report over all hosts: who is asked what, who is not waited for, and when a report comes again.
#include "launch/watch/hang_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "launch/launched.h"

namespace deeptide::launch {
namespace {

RankState rank_waiting_at(int rank, uint64_t newest, double waited_s) {
  RankState state;
  state.rank = rank;
  state.pid = 1000 + rank;
  state.process = 'S';
  state.step = 7;
  state.phase = "backward";
  state.newest["reductions"] = {newest, "all-to-all"};
  if (waited_s > 0)
    state.waiting = CollectiveState{"all-to-all", "reductions", "backward", "h.1", "", 7, 0, newest, waited_s};
  return state;
}

/// A job of two hosts with two ranks each, of which rank 3 is late; they answer at once unless told not to.
class Job {
 public:
  explicit Job(double timeout_s = 10.0)
      : watch_(options(timeout_s), getpid(), [this](const std::string& text) { reports.push_back(text); }) {
    watch_.watch({{"worker-1", 0, 2, [this](const auto& question) { answer(0, question); }},
                  {"worker-2", 2, 2, [this](const auto& question) { answer(1, question); }}},
                 4);
  }

  void answer(size_t host, StateQuestion question) {
    asked.push_back({host, question});
    if (mute.count(host)) return;
    StateAnswer answer{question.id, {}};
    for (const RankState& state : states) {
      if (static_cast<size_t>(state.rank / 2) != host) continue;
      if (question.stacks_of.empty()) answer.states.push_back(state);
      for (const int rank : question.stacks_of) {
        if (rank != state.rank) continue;
        answer.states.push_back(state);
        answer.states.back().stacks = "stack of " + std::to_string(rank) + "\n";
      }
    }
    watch_.on_answer(host, encode(answer));
  }

  HangWatch& watch() { return watch_; }

  std::vector<RankState> states{rank_waiting_at(0, 5, 12.0), rank_waiting_at(1, 5, 12.0), rank_waiting_at(2, 5, 11.0),
                                rank_waiting_at(3, 4, 0.0)};
  std::set<size_t> mute;
  std::vector<std::pair<size_t, StateQuestion>> asked;
  std::vector<std::string> reports;

 private:
  static Options options(double timeout_s) {
    Options made;
    made.hang_timeout_s = timeout_s;
    made.command = {"train.py", "--x"};
    return made;
  }

  HangWatch watch_;
};

TEST(HangWatch, AsksNobodyUntilAHostIsLate) {
  Job job;
  job.watch().check();
  EXPECT_TRUE(job.asked.empty());
}

TEST(HangWatch, MergesAllHostsIntoOneReport) {
  Job job;
  job.watch().on_late(0, 12.0);
  job.watch().on_late(1, 11.0);
  job.watch().check();
  ASSERT_EQ(job.reports.size(), 1u);
  const std::string& report = job.reports[0];
  EXPECT_TRUE(has(report, "no collective has completed for 12 s")) << report;
  EXPECT_TRUE(has(report,
                  "rank 3 on worker-2 is in backward at step 7; its last in 'reductions' is all-to-all 4; the "
                  "others are at 5\n  rank 3, process 1003 on worker-2:\n    stack of 3\n"))
      << report;
  EXPECT_TRUE(has(report,
                  "ranks 0-2 on worker-1, worker-2 waiting for all-to-all 5 of h.1, in backward at step 7, for "
                  "12.0 s\n  rank 0, process 1000 on worker-1:\n    stack of 0\n"))
      << report;
  EXPECT_EQ(job.asked.size(), 4u) << "each host for its ranks, then for one stack each";
}

TEST(HangWatch, AsksOnceHoweverManyHostsBecomeLateMeanwhile) {
  Job job;
  job.mute = {1};
  job.watch().on_late(0, 12.0);
  job.watch().check();
  job.watch().on_late(1, 12.0);
  job.watch().check();
  EXPECT_EQ(job.asked.size(), 2u) << "each host once";
  job.mute.clear();
  job.answer(1, job.asked[1].second);
  job.watch().check();
  job.watch().check();
  EXPECT_EQ(job.reports.size(), 1u);
}

TEST(HangWatch, ReportsAgainOnlyAfterSomebodyHasMoved) {
  Job job;
  job.watch().on_late(0, 12.0);
  job.watch().check();
  job.watch().on_late(1, 12.0);
  job.watch().check();
  EXPECT_EQ(job.reports.size(), 1u);
  for (size_t host : {0, 1}) job.watch().on_late(host, 0.0);
  job.watch().check();
  job.watch().on_late(1, 10.0);
  job.watch().check();
  EXPECT_EQ(job.reports.size(), 2u);
}

TEST(HangWatch, SaysNothingWhenTheWaitIsOverByTheTimeTheHostsAnswer) {
  Job job;
  for (RankState& state : job.states) state.waiting.reset();
  job.watch().on_late(0, 12.0);
  job.watch().check();
  EXPECT_TRUE(job.reports.empty());
  for (int rank = 0; rank < 3; ++rank) job.states[rank] = rank_waiting_at(rank, 5, 12.0);
  job.watch().on_late(1, 12.0);  // another wait, while the first host has not said yet that its own is over
  job.watch().check();
  EXPECT_EQ(job.reports.size(), 1u);
}

TEST(HangWatch, DoesNotWaitForAHostThatIsLost) {
  Job job;
  job.mute = {1};
  job.watch().on_late(0, 12.0);
  job.watch().check();
  EXPECT_TRUE(job.reports.empty());
  job.watch().on_over(1);
  job.watch().check();
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_TRUE(has(job.reports[0], "ranks 2, 3 on worker-2: ended\n")) << job.reports[0];
}

TEST(HangWatch, NamesAHostThatDoesNotAnswerAndDropsItsLateAnswer) {
  Job job;
  job.mute = {1};
  job.watch().on_late(0, 12.0);
  EXPECT_TRUE(eventually([&] {
    job.watch().check();
    return !job.reports.empty();
  }));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_TRUE(has(job.reports[0], "ranks 2, 3 on worker-2: no answer from the host\n")) << job.reports[0];
  EXPECT_FALSE(has(job.reports[0], "every rank has come")) << job.reports[0];
  job.mute.clear();
  job.answer(1, job.asked[1].second);
  job.watch().check();
  EXPECT_EQ(job.reports.size(), 1u);
}

TEST(HangWatch, AnswersPsAndStacksForTheWholeJob) {
  Job job;
  std::string ps, stacks;
  const LiveJob live{std::to_string(getpid()),
                     "deeptide/" + std::to_string(geteuid()) + "/" + std::to_string(getpid())};
  std::jthread caller([&] {
    ps = ask(live, "ps", 5);
    stacks = ask(live, "stacks", 5);
  });
  EXPECT_TRUE(eventually([&] {
    PollSet set;
    job.watch().add_to(set);
    set.wake_by(Clock::now() + std::chrono::milliseconds(10));
    set.wait();
    job.watch().check();
    return job.asked.size() == 6;
  }));
  caller.join();
  EXPECT_EQ(ps.find(std::to_string(getpid()) + "\t2\t4\t7\t12 s\t"), 0u) << ps;
  EXPECT_TRUE(has(ps, "\ttrain.py --x\n")) << ps;
  EXPECT_EQ(stacks.find("rank 3 on worker-2 is in backward"), 0u) << stacks;
  EXPECT_TRUE(job.reports.empty());
}

TEST(HangWatch, PassesOnWhatTopAndTraceAsk) {
  Job job;
  job.states[0].last_step = trace::FlightFacts{.step = 7, .loss = 2.5, .total_s = 0.5};
  std::string top, trace;
  const LiveJob live{std::to_string(getpid()),
                     "deeptide/" + std::to_string(geteuid()) + "/" + std::to_string(getpid())};
  std::jthread caller([&] {
    top = ask(live, "top", 5);
    trace = ask(live, "trace 3 /a folder", 5);
  });
  EXPECT_TRUE(eventually([&] {
    PollSet set;
    job.watch().add_to(set);
    set.wake_by(Clock::now() + std::chrono::milliseconds(10));
    set.wait();
    job.watch().check();
    return job.asked.size() == 4;
  }));
  caller.join();
  EXPECT_GT(job.asked[1].second.watch_s, 0.0);
  EXPECT_EQ(job.asked[1].second.trace_number, 0u);
  EXPECT_TRUE(has(top, R"("loss":2.5)")) << top;
  EXPECT_TRUE(has(top, R"("norm":0.0)")) << top;
  for (const size_t host : {2, 3}) {
    EXPECT_EQ(job.asked[host].second.trace_steps, 3);
    EXPECT_EQ(job.asked[host].second.trace_folder, "/a folder");
    EXPECT_EQ(std::to_string(job.asked[host].second.trace_number), trace);
  }
}

TEST(StateExchange, CarriesWhatIsUnknownAsSuch) {
  RankState state = rank_waiting_at(2, 5, 0.0);
  state.traced = 4;
  state.last_step = trace::FlightFacts{.step = 9, .loss = std::nan("")};
  std::strcpy(state.last_step->limit, "limited by data");
  const auto back = decode<StateAnswer>(encode(StateAnswer{1, {state, rank_waiting_at(3, 5, 0.0)}})).states;
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].traced, 4u);
  ASSERT_TRUE(back[0].last_step);
  EXPECT_EQ(back[0].last_step->step, 9);
  EXPECT_TRUE(std::isnan(back[0].last_step->loss));
  EXPECT_STREQ(back[0].last_step->limit, "limited by data");
  EXPECT_FALSE(back[1].last_step);
}

}  // namespace
}  // namespace deeptide::launch
