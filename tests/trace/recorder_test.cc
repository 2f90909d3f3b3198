// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Phases add up, spans nest, and nothing is told without a sink.
#include "trace/recorder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace deeptide::trace {
namespace {

class Kept : public Sink {
 public:
  struct One {
    Work work;
    Phase phase;
    std::string name;
    int64_t begin_ns, end_ns, step, bytes;
    bool in_turn;
  };
  void begin(const SpanRecord&) noexcept override { ++begun; }
  void end(const SpanRecord& s) noexcept override {
    all.push_back({s.work, s.phase, std::string(s.name), s.begin_ns, s.end_ns, s.step, s.bytes, s.in_turn});
  }
  std::vector<One> of(Work work) const {
    std::vector<One> found;
    for (const One& one : all) {
      if (one.work == work) found.push_back(one);
    }
    return found;
  }
  int begun = 0;
  std::vector<One> all;
};

TEST(Recorder, FollowsOnePhaseByTheNextWithoutAGap) {
  Recorder recorder;
  Kept kept;
  recorder.add(kept);
  for (const Phase phase : {Phase::between, Phase::forward, Phase::backward, Phase::step, Phase::between}) {
    recorder.enter(phase, 7);
  }
  const auto phases = kept.of(Work::phase);
  ASSERT_EQ(phases.size(), 4u);
  for (size_t i = 1; i < phases.size(); ++i) EXPECT_EQ(phases[i].begin_ns, phases[i - 1].end_ns);
  EXPECT_EQ(phases[1].name, "forward");
  EXPECT_EQ(phases[3].name, "step");
  EXPECT_EQ(phases[3].step, 7);
  recorder.remove(kept);
}

TEST(Recorder, TellsWhatIsLeftOfAPhaseToASinkThatComesWithinIt) {
  Recorder recorder;
  Kept kept;
  recorder.enter(Phase::between, 1);
  const int64_t before = now_ns();
  recorder.add(kept);
  const int64_t after = now_ns();
  recorder.enter(Phase::forward, 1);
  recorder.enter(Phase::outside, 1);
  recorder.remove(kept);
  const auto phases = kept.of(Work::phase);
  ASSERT_EQ(phases.size(), 2u);
  EXPECT_EQ(phases[0].name, "between");
  EXPECT_TRUE(before <= phases[0].begin_ns && phases[0].begin_ns <= after);
  EXPECT_EQ(phases[1].begin_ns, phases[0].end_ns);
  recorder.add(kept);  // in no phase
  recorder.enter(Phase::between, 2);
  recorder.remove(kept);
  EXPECT_EQ(kept.of(Work::phase).size(), 2u);
}

TEST(Recorder, TakesTimeForForwardThatNobodyAnnounced) {
  Recorder recorder;
  Kept kept;
  recorder.add(kept);
  recorder.enter(Phase::between, 1);
  recorder.enter(Phase::backward, 1);
  recorder.enter(Phase::step, 1);
  EXPECT_EQ(kept.of(Work::phase)[0].name, "forward");
  recorder.enter(Phase::between, 2);
  recorder.enter_unit("forward", 2, "h.0");  // a sharded unit shows where the forward begins
  recorder.enter(Phase::backward, 2);
  const auto phases = kept.of(Work::phase);
  EXPECT_EQ(phases[3].name, "between");
  EXPECT_EQ(phases[4].name, "forward");
  ASSERT_EQ(kept.of(Work::unit).size(), 1u);
  EXPECT_EQ(kept.of(Work::unit)[0].name, "h.0");
  recorder.remove(kept);
}

TEST(Span, CountsInTurnOnlyOutermostOnTheTrainingThread) {
  Recorder recorder;
  Kept kept;
  recorder.add(kept);
  recorder.enter(Phase::step, 1);
  {
    const Span optimizer(&recorder, Work::optimizer, "optimizer");
    const Span wait(&recorder, Work::wait, "wait");
    const Span file(&recorder, Work::file, "file");
  }
  std::thread([&] { const Span elsewhere(&recorder, Work::wait, "elsewhere"); }).join();
  ASSERT_EQ(kept.all.size(), 4u);
  EXPECT_FALSE(kept.all[0].in_turn) << "a file within a wait";
  EXPECT_TRUE(kept.all[1].in_turn);
  EXPECT_TRUE(kept.all[2].in_turn) << "the optimizer's waits count by themselves";
  EXPECT_FALSE(kept.all[3].in_turn) << "another thread";
  recorder.remove(kept);
}

TEST(Span, TellsNobodyWithoutASink) {
  Recorder recorder;
  Kept kept;
  recorder.add(kept);
  recorder.remove(kept);
  recorder.enter(Phase::forward, 1);
  { const Span span(&recorder, Work::wait, "wait"); }
  { const Span span(nullptr, Work::wait, "wait"); }
  recorder.note_collective("all-gather", "gathers", 2, 5, now_ns());
  EXPECT_FALSE(recorder.is_on());
  EXPECT_TRUE(kept.all.empty());
}

TEST(RecorderScope, IsThisThreadsAndNests) {
  Recorder one, two;
  EXPECT_EQ(RecorderScope::current(), nullptr);
  const RecorderScope outer(&one);
  {
    const RecorderScope inner(&two);
    EXPECT_EQ(RecorderScope::current(), &two);
    std::thread([] { EXPECT_EQ(RecorderScope::current(), nullptr); }).join();
  }
  EXPECT_EQ(RecorderScope::current(), &one);
}

}  // namespace
}  // namespace deeptide::trace
