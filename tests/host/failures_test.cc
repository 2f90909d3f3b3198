// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks that never arrive, fall behind or are killed: the others name them promptly, and nothing is left behind.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "host/exchange.h"
#include "on_hosts.h"
#include "processes.h"

namespace deeptide::host {
namespace {

using at::Tensor;
using device::Role;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

const comm::Site kHere{"backward", "reducing unit 'h.3'"};

/// Exchanges as an engine's ranks do; never ends by itself. Writes a file of its rank's number once it begins.
void work_for_ever(const World& world, const std::string& kind, const std::string& begun) {
  const auto host = Host::find(world, "host", true);
  comm::Group group(world, comm::Team::whole(world), "test",
                    {.timeout = milliseconds(60'000), .board = board_of(world), .host = host, .clock = clock_at(7)});
  std::string why_not;
  Exchange exchange(host, Arena::create(*host, 4096, 4 << 20, why_not));
  const auto ledger = std::make_shared<device::Ledger>();
  const int64_t numel = 300'000;  // several pieces
  const Tensor input = at::full({numel}, 1.0f), output = at::empty({world.size * numel});
  const Tensor flat = exchange.arena().allocate(ledger, Role::communication, 1 << 20);
  group.barrier(kHere);
  std::ofstream(begun + "/" + std::to_string(world.rank)).put('1');
  for (;;) {
    if (kind == "barrier") {
      group.barrier(kHere);
    } else if (kind == "all_gather") {
      auto pending = group.all_gather(output, input);
      group.wait(pending, kHere);
    } else {
      auto offer = exchange.offer(flat);
      auto pending = group.track(offer.operation, "reduce-scatter", 0);
      group.wait(pending, kHere);
      const auto rows = exchange.rows(offer.number, 0, 1000, at::kFloat);
      exchange.set_read(offer.number);
    }
  }
}

class Killed : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(Killed, AtAnyMomentIsNamedByTheOthersWithinASecondOrTwo) {
  const auto [kind, victim] = GetParam();
  static std::mt19937 random(11);
  std::string begun = std::filesystem::temp_directory_path() / "deeptide_begun_XXXXXX";
  ASSERT_NE(::mkdtemp(begun.data()), nullptr);
  RankProcesses ranks(3, [kind, begun](const World& world) { work_for_ever(world, kind, begun); });
  for (int r = 0; r < 3; ++r) {
    while (!std::filesystem::exists(begun + "/" + std::to_string(r))) std::this_thread::sleep_for(milliseconds(5));
  }
  std::filesystem::remove_all(begun);
  std::this_thread::sleep_for(milliseconds(random() % 250));
  const auto begin = steady_clock::now();
  ranks.kill(victim);
  const auto& outcomes = ranks.wait(std::chrono::seconds(30));
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(outcomes[r].ended_in_time) << "rank " << r;
    if (r == victim) {
      EXPECT_TRUE(outcomes[r].killed);
      continue;
    }
    const std::string& error = outcomes[r].error;
    EXPECT_EQ(error.find("rank " + std::to_string(r) + " lost its peers at step 7, backward"), 0u) << error;
    EXPECT_NE(error.find("'s process"), std::string::npos) << error;
    EXPECT_LT(outcomes[r].when - begin, milliseconds(5000)) << "of 60 s; a loaded machine is slow";
  }
  const auto names_victim = [&](const auto& outcome) {
    return outcome.error.find("rank " + std::to_string(victim) + "'s process") != std::string::npos;
  };
  EXPECT_TRUE(std::any_of(outcomes.begin(), outcomes.end(), names_victim)) << "the other may name who named it";
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().string().find("deeptide"), std::string::npos) << entry.path();
  }
}

INSTANTIATE_TEST_SUITE_P(At, Killed,
                         testing::Combine(testing::Values("barrier", "all_gather", "exchange"), testing::Values(0, 2)));

TEST(HostFailures, NameTheRankThatNeverCame) {
  Meeting meeting(3);
  const auto errors = errors_of_ranks(3, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = milliseconds(700), .board = board_of(world), .host = host, .clock = clock_at(7)});
    if (world.rank == 1) return meeting.arrive();
    meeting.arrive_after([&] { group.barrier(kHere); });
  });
  EXPECT_EQ(errors[1], "");
  for (int r : {0, 2}) {
    for (const char* part : {"timed out after 0.7", "step 7, backward, reducing unit 'h.3'", "no report from rank 1",
                             "\"comm_timeout\""}) {
      EXPECT_NE(errors[r].find(part), std::string::npos) << part << " is not in: " << errors[r];
    }
  }
}

TEST(HostFailures, TellWhenAnotherSaysThatItCannotGoOn) {
  Meeting meeting(2);
  const auto errors = errors_of_ranks(2, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    const auto board = board_of(world);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board, .host = host, .clock = clock_at(7)});
    meeting.arrive();
    if (world.rank == 1) return board->report_failure("failed in forward: out of ideas");
    group.barrier(kHere);
  });
  EXPECT_NE(errors[0].find("rank 1 failed in forward: out of ideas"), std::string::npos) << errors[0];
}

TEST(HostFailures, LetFinishWhatAnEndedProcessHasDone) {
  RankProcesses ranks(2, [](const World& world) {
    const auto host = Host::find(world, "host", true);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board_of(world), .host = host, .clock = clock_at(7)});
    const Tensor output = at::empty({2});
    auto pending = group.all_gather(output, at::full({1}, world.rank + 1.0f));
    if (world.rank == 1) return group.wait(pending, kHere);  // and ends
    while (!host->find_dead()) std::this_thread::sleep_for(milliseconds(5));
    group.wait(pending, kHere);
    TORCH_CHECK(output[1].item<float>() == 2.0f);
    TORCH_CHECK(host->find_dead()->find("rank 1's process ") == 0, *host->find_dead());
  });
  for (const auto& outcome : ranks.wait(std::chrono::seconds(30))) {
    EXPECT_TRUE(outcome.ended_in_time);
    EXPECT_EQ(outcome.error, "");
  }
}

// Ranks 0 and 2 are killed; rank 1 misses rank 2 first. Later rank 3 finds both gone, and nobody whom it could ask.
TEST(HostFailures, NameTheProcessThatWasMissedFirst) {
  RankProcesses ranks(4, [](const World& world) {
    const auto host = Host::find(world, "host", true);
    const auto wait_for = [&](const char* key) {
      while (!world.store->check({key})) std::this_thread::sleep_for(milliseconds(5));
    };
    if (world.rank == 2) ::kill(::getpid(), SIGKILL);
    if (world.rank == 0) {
      wait_for("missed");
      ::kill(::getpid(), SIGKILL);
    }
    while (!host->find_killed()) std::this_thread::sleep_for(milliseconds(5));
    if (world.rank == 1) world.store->set("missed", std::string("rank 2"));
    wait_for("missed");
    while (host->find_dead()->find("rank 0") != 0) std::this_thread::sleep_for(milliseconds(5));
    TORCH_CHECK(host->find_killed()->find("rank 2's process ") == 0, *host->find_killed());
  });
  const auto& outcomes = ranks.wait(std::chrono::seconds(30));
  for (int r : {1, 3}) {
    EXPECT_TRUE(outcomes[r].ended_in_time);
    EXPECT_EQ(outcomes[r].error, "");
  }
}

TEST(HostFailures, NameTheKilledRankOnTheOtherHostToo) {
  RankProcesses ranks(4, [](World world) {
    world.host = world.rank < 2 ? "one" : "other";
    const auto board = board_of(world);
    const auto host = Host::find(world, "host", true, board);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board, .host = host, .clock = clock_at(7)});
    try {
      for (int round = 0;; ++round) {
        group.barrier(kHere);
        if (world.rank == 3 && round == 3) ::kill(::getpid(), SIGKILL);
      }
    } catch (const CommError&) {
      board->report_end("has ended training at step 7");
      throw;
    }
  });
  const auto& outcomes = ranks.wait(std::chrono::seconds(30));
  EXPECT_TRUE(outcomes[3].killed);
  for (int r : {0, 1, 2}) {
    EXPECT_TRUE(outcomes[r].ended_in_time);
    EXPECT_NE(outcomes[r].error.find("rank 3's process "), std::string::npos) << outcomes[r].error;
    EXPECT_EQ(outcomes[r].error.find("no report from"), std::string::npos) << outcomes[r].error;
  }
}

TEST(HostFailures, DoNotCountAProcessThatToldOfItsEndAsKilled) {
  for (const bool shared : {true, false}) {
    RankProcesses ranks(3, [&](const World& world) {
      const auto board = board_of(world);
      const auto host = Host::find(world, "host", shared, board);
      if (world.rank == 0) return board->report_end("has ended training at step 3");
      if (world.rank == 1) ::kill(::getpid(), SIGKILL);
      while (!host->find_killed()) std::this_thread::sleep_for(milliseconds(5));
      while (host->find_dead()->find("rank 0") != 0) std::this_thread::sleep_for(milliseconds(5));
      TORCH_CHECK(host->find_killed()->find("rank 1's process ") == 0, *host->find_killed());
    });
    EXPECT_EQ(ranks.wait(std::chrono::seconds(30))[2].error, "") << shared;
  }
}

TEST(HostFailures, KnowAProcessThatHadEndedBeforeItWasLookedFor) {
  // Rank 1 reports where it runs and ends before rank 0 has read it.
  RankProcesses ranks(2, [](const World& world) {
    if (world.rank == 1) {
      const std::string line = std::to_string(::getpid()) + " 1 here";
      world.store->set("host/1", line);
      world.store->set("host/connected/1", std::string("ok"));
      world.store->set("host/0/shared/0/1", std::string("ok"));
      return;
    }
    std::this_thread::sleep_for(milliseconds(300));
    World here = world;
    here.host = "here";
    const auto host = Host::find(here, "host", true);
    TORCH_CHECK(host->holds_all(), host->text());
    TORCH_CHECK(host->find_dead().has_value(), "nobody is missed");
  });
  for (const auto& outcome : ranks.wait(std::chrono::seconds(30))) EXPECT_EQ(outcome.error, "");
}

}  // namespace
}  // namespace deeptide::host
