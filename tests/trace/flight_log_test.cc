// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ring of last collectives: what is written, what is overwritten, and by many threads.
#include "trace/flight_log.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace deeptide::trace {
namespace {

class Log : public testing::Test {
 protected:
  const FlightEntry& entry(uint64_t number) const { return ring_->entries[(number - 1) % kFlightEntries]; }

  std::unique_ptr<FlightRing> ring_ = std::make_unique<FlightRing>();
  FlightLog log_{*ring_};
};

TEST_F(Log, KeepsWhatACollectiveSaysOfItself) {
  const auto ticket = log_.begin({"all-gather", "gathers", "forward", "h.3", "h.3.attn.weight", 7, 4096, 311, 2});
  const FlightEntry& written = entry(ticket);
  EXPECT_STREQ(written.operation, "all-gather");
  EXPECT_STREQ(written.channel, "gathers");
  EXPECT_STREQ(written.phase, "forward");
  EXPECT_STREQ(written.unit, "h.3");
  EXPECT_STREQ(written.parameter, "h.3.attn.weight");
  EXPECT_EQ(written.step, 7);
  EXPECT_EQ(written.bytes, 4096);
  EXPECT_EQ(written.sequence, 311u);
  EXPECT_EQ(written.rank, 2);
  EXPECT_EQ(ring_->rank, 2);
  EXPECT_GT(written.started_ns, 0);
  EXPECT_EQ(written.waiting_ns, 0);
  EXPECT_EQ(written.finished_ns, 0);
}

TEST_F(Log, NotesWhenSomebodyWaitsAndWhenItEnds) {
  const auto ticket = log_.begin({});
  log_.waiting(ticket);
  const int64_t since = entry(ticket).waiting_ns;
  EXPECT_GE(since, entry(ticket).started_ns);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  log_.waiting(ticket);
  EXPECT_EQ(entry(ticket).waiting_ns, since) << "the first wait counts";
  log_.end(ticket);
  EXPECT_GT(entry(ticket).finished_ns, since);
  EXPECT_EQ(ring_->last_event_ns, entry(ticket).finished_ns);
}

TEST_F(Log, KeepsTheEndOfALongName) {
  const auto ticket = log_.begin({.operation = "a", .unit = std::string(100, 'x') + ".layers.12.mlp"});
  const std::string unit = entry(ticket).unit;
  EXPECT_EQ(unit.size(), sizeof(FlightEntry::unit) - 1);
  EXPECT_EQ(unit.substr(unit.size() - 14), ".layers.12.mlp");
}

TEST_F(Log, LeavesAnEntryAloneThatWasReused) {
  const auto old = log_.begin({});
  for (int i = 0; i < kFlightEntries; ++i) log_.begin({});
  log_.end(old);
  log_.waiting(old);
  EXPECT_EQ(entry(old).number, old + kFlightEntries);
  EXPECT_EQ(entry(old).finished_ns, 0);
  EXPECT_EQ(entry(old).waiting_ns, 0);
  log_.end(0);  // no ticket: nothing
}

TEST_F(Log, NotesWhereTheRankIs) {
  log_.enter(3, "backward", "h.12.mlp");
  EXPECT_EQ(ring_->place.version, 2u);
  EXPECT_EQ(ring_->place.step, 3);
  EXPECT_STREQ(ring_->place.phase, "backward");
  EXPECT_STREQ(ring_->place.module, "h.12.mlp");
}

TEST_F(Log, NotesTheSlowLink) {
  EXPECT_EQ(ring_->slow_link.from, -1);
  log_.slow_link(5, 1, 6e6, 1.2e7);
  EXPECT_EQ(ring_->slow_link.from, 5);
  EXPECT_EQ(ring_->slow_link.to, 1);
  EXPECT_EQ(ring_->slow_link.bytes_per_s, 6'000'000);
  EXPECT_EQ(ring_->slow_link.others, 12'000'000);
  log_.slow_link(-1, -1, 0.0, 0.0);  // links are even again
  EXPECT_EQ(ring_->slow_link.from, -1);
}

TEST_F(Log, CountsEveryEntryOfManyThreads) {
  constexpr int kThreads = 4, kEach = 20'000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < kEach; ++i) {
        const auto ticket = log_.begin({.operation = "all-gather", .sequence = static_cast<uint64_t>(i), .rank = t});
        log_.enter(i, "forward", "m");
        log_.end(ticket);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ring_->last_number, static_cast<uint64_t>(kThreads) * kEach);
  EXPECT_EQ(ring_->place.version % 2, 0u);
}

TEST(FlightLog, IsPlainMemoryWithoutALauncher) {
  const auto ticket = flight_log().begin({.operation = "all-gather"});
  EXPECT_GT(ticket, 0u);
  flight_log().end(ticket);
}

}  // namespace
}  // namespace deeptide::trace
