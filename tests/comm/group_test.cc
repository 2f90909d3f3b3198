// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives between ranks, rounds of messages, and the survivors' error when a rank does not arrive.
#include "comm/group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <csignal>
#include <filesystem>
#include <random>
#include <thread>

#include "comm/rounds.h"
#include "deeptide/interpreter.h"
#include "on_hosts.h"
#include "world/failure_board.h"

namespace deeptide::comm {
namespace {

using at::Tensor;
using std::chrono::milliseconds;

const Site kHere{"forward", "gathering unit 'h.3'"};

Tensor iota(int64_t first, int64_t count) { return at::arange(first, first + count, at::kFloat); }

/// Threads of this process that do not preempt others when they wake up.
int num_background_threads() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    count += sched_getscheduler(std::stoi(entry.path().filename())) == SCHED_BATCH ? 1 : 0;
  }
  return count;
}

class Collectives : public testing::TestWithParam<int> {};

TEST_P(Collectives, MoveEveryRowToItsPlace) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
    const int64_t r = world.rank, n = 5;
    const Tensor gathered = at::empty({size * n}), exchanged = at::empty({size * n}), reduced = at::empty({n});
    auto a = group.all_gather(gathered, iota(100 * r, n));
    auto b = group.all_to_all(exchanged, iota(1000 * r, size * n));
    auto c = group.reduce_scatter(reduced, at::full({size * n}, static_cast<float>(r + 1)));
    const Tensor sent = at::full({3}, static_cast<float>(r));
    auto d = group.broadcast(sent, size - 1);
    for (auto* pending : {&a, &b, &c, &d}) group.wait(*pending, kHere);
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_TRUE(at::equal(gathered.narrow(0, peer * n, n), iota(100 * peer, n)));
      EXPECT_TRUE(at::equal(exchanged.narrow(0, peer * n, n), iota(1000 * peer + r * n, n)));
    }
    EXPECT_TRUE(at::equal(reduced, at::full({n}, size * (size + 1) / 2.0f)));
    EXPECT_TRUE(at::equal(sent, at::full({3}, size - 1.0f)));
    EXPECT_FALSE(a.valid()) << "waited for";
  });
}

TEST_P(Collectives, MayLeaveTheOwnRowWhereItIs) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
    const int64_t r = world.rank, n = 5;
    const Tensor gathered = at::full({size * n}, -1.0f), exchanged = at::full({size * n}, -1.0f);
    auto a = group.all_gather(gathered, iota(100 * r, n), OwnRow::left);
    auto b = group.all_to_all(exchanged, iota(1000 * r, size * n), OwnRow::left);
    for (auto* pending : {&a, &b}) group.wait(*pending, kHere);
    for (int64_t peer = 0; peer < size; ++peer) {
      if (peer == r) continue;
      EXPECT_TRUE(at::equal(gathered.narrow(0, peer * n, n), iota(100 * peer, n)));
      EXPECT_TRUE(at::equal(exchanged.narrow(0, peer * n, n), iota(1000 * peer + r * n, n)));
    }
  });
}

TEST_P(Collectives, DoNotWaitForAnotherChannels) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    const auto board = board_of(world);
    Group first(world, Team::whole(world), "first", {.timeout = kLong, .board = board}),
        second(world, Team::whole(world), "second", {.timeout = kLong, .board = board});
    const Tensor one = at::empty({size}), two = at::empty({size});
    const bool odd = world.rank % 2;  // issues and waits in the other order
    Group& mine = odd ? second : first;
    Group& theirs = odd ? first : second;
    auto a = mine.all_gather(odd ? two : one, iota(world.rank, 1));
    auto b = theirs.all_gather(odd ? one : two, iota(world.rank, 1));
    mine.wait(a, kHere);
    theirs.wait(b, kHere);
    EXPECT_TRUE(at::equal(one, iota(0, size)) && at::equal(two, iota(0, size)));
  });
}

TEST_P(Collectives, ArriveWhenManyOfAllSizesAreUnderWay) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
    std::mt19937 random(world.rank);
    std::vector<Tensor> gathered, exchanged;
    std::vector<Pending> under_way;
    const std::vector<int64_t> sizes{3, 0, 1'500'000, 1, 70'000, 0, 300'000, 5};
    for (const int64_t n : sizes) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));  // ranks drift apart
      gathered.push_back(at::empty({size * n}));
      const Tensor own = gathered.back().narrow(0, world.rank * n, n);  // gathered in place, as units are
      own.copy_(iota(n + world.rank, n));
      under_way.push_back(group.all_gather(gathered.back(), own));
      exchanged.push_back(at::empty({size * n}));
      under_way.push_back(group.all_to_all(exchanged.back(), iota(100 * world.rank, size * n)));
    }
    for (Pending& pending : under_way) group.wait(pending, kHere);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t n = sizes[i];
      for (int64_t peer = 0; peer < size; ++peer) {
        EXPECT_TRUE(at::equal(gathered[i].narrow(0, peer * n, n), iota(n + peer, n))) << n << " from " << peer;
        EXPECT_TRUE(at::equal(exchanged[i].narrow(0, peer * n, n), iota(100 * peer + world.rank * n, n)))
            << n << " from " << peer;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, testing::Values(1, 2, 3, 4));

TEST(Group, TakesAClosedConnectionForAnErrorNotForASignal) {
  const auto handler_after = [](void (*before)(int)) {
    signal(SIGPIPE, before);
    run_ranks(2, [](const World& world) {
      Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
      group.barrier(kHere);
    });
    return signal(SIGPIPE, SIG_DFL);
  };
  const auto of_the_program = +[](int) {};
  EXPECT_EQ(handler_after(SIG_DFL), SIG_IGN);
  EXPECT_EQ(handler_after(of_the_program), of_the_program);
  signal(SIGPIPE, SIG_IGN);
}

TEST(Group, MovesTensorsOnThreadsThatTakeNoCoreFromOthers) {
  if (sched_getscheduler(0) != SCHED_OTHER) GTEST_SKIP() << "runs with another policy already";
  run_ranks(2, [](const World& world) {
    const sched_param priority{};
    ASSERT_EQ(sched_setscheduler(0, SCHED_OTHER, &priority), 0);  // not as the tests' ranks, but as programs
    const auto board = board_of(world);
    Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board});
    control.barrier(kHere);
    EXPECT_EQ(num_background_threads(), 0);
    control.barrier(kHere);
    const Group gathers(world, Team::whole(world), "gathers", {.timeout = kLong, .board = board, .on_device = true});
    EXPECT_GT(num_background_threads(), 0);
    EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER) << "the thread that asks goes on as it was";
    control.barrier(kHere);
  });
}

// The peer is connected and never takes part: a group that waited for it would outlast the limit of the test.
TEST(Group, LeavesWhatIsUnderWayWhenItEnds) {
  run_ranks(2, [](const World& world) {
    const std::chrono::minutes endless(10);
    {
      Group group(world, Team::whole(world), "test", {.timeout = endless, .board = board_of(world)});
      std::vector<Pending> dropped;
      if (world.rank == 0) {
        for (int i = 0; i < 3; ++i) dropped.push_back(group.all_gather(at::empty({2000}), iota(0, 1000)));
        EXPECT_FALSE(dropped.front().wait_for(milliseconds(20)));
      } else {
        world.store->wait({"left"});
      }
    }
    if (world.rank == 0) world.store->set("left", std::vector<uint8_t>{1});
  });
}

TEST(Group, SaysWhoNeverCameWhereAndWhichSettingLimitsTheWait) {
  const auto errors = errors_of_ranks(3, [](const World& world) {
    Group group(world, Team::whole(world), "test",
                {.timeout = milliseconds(1500), .board = board_of(world), .clock = clock_at(7)});
    if (world.rank == 1) {
      std::this_thread::sleep_for(milliseconds(3000));  // connected, alive, but elsewhere
      return;
    }
    const Tensor out = at::empty({3});
    auto pending = group.all_gather(out, iota(world.rank, 1));
    group.wait(pending, kHere);
  });
  EXPECT_EQ(errors[1], "");
  for (int r : {0, 2}) {
    for (const char* part : {"step 7, forward, gathering unit 'h.3'", "no report from rank 1"}) {
      EXPECT_NE(errors[r].find(part), std::string::npos) << part << " is not in: " << errors[r];
    }
    EXPECT_EQ(errors[r].find("rank " + std::to_string(r)), 0u) << errors[r];
  }
}

TEST(Group, EndsTheOthersWaitsSoonAfterARankReportsItsFailure) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(3, [](const World& world) {
    const auto board = board_of(world);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board});
    if (world.rank == 2) {
      board->report_failure("failed in forward: out of ideas");
      std::this_thread::sleep_for(milliseconds(2500));  // its channels stay open
      return;
    }
    const Tensor out = at::empty({3});
    auto pending = group.all_gather(out, iota(world.rank, 1));
    group.wait(pending, kHere);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong / 2);
  for (int r : {0, 1}) {
    EXPECT_NE(errors[r].find("rank 2 failed in forward: out of ideas"), std::string::npos) << errors[r];
  }
}

TEST(Group, StopsWaitingForARankThatRaisedAnErrorAndDoesNotGoOn) {
  Meeting meeting(3);
  const auto errors = errors_of_ranks(3, [&](const World& world) {
    const auto board = std::make_shared<world::FailureBoard>(world, "board", milliseconds(500));
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board});
    std::string text;
    try {
      if (world.rank == 2) board->report_error("raised ValueError in forward", "out of ideas\nand of lines");
      if (world.rank != 2) group.barrier(kHere);
    } catch (const CommError& error) {
      text = error.what();
    }
    meeting.arrive();  // its channels stay open until then
    if (!text.empty()) throw CommError(text);
  });
  EXPECT_EQ(errors[2], "");
  for (int r : {0, 1}) {
    const std::string end = "gathering unit 'h.3': rank 2 raised ValueError in forward: out of ideas";
    EXPECT_NE(errors[r].find(end), std::string::npos) << errors[r];
    EXPECT_EQ(errors[r].find("and of lines"), std::string::npos) << errors[r];
  }
}

TEST(Group, WaitsForARankThatGoesOnAfterAnError) {
  const milliseconds grace(4 * world::kPollFailures);
  run_ranks(3, [&](const World& world) {
    const auto board = std::make_shared<world::FailureBoard>(world, "board", grace);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board});
    for (int batch = 0; world.rank == 2 && batch < 2; ++batch) {
      board->report_error("raised ValueError in forward", "out of ideas");
      if (batch == 0) std::this_thread::sleep_for(2 * world::kPollFailures);  // the others see it
      board->withdraw_error();
      std::this_thread::sleep_for(grace + 2 * world::kPollFailures);
    }
    group.barrier(kHere);
  });
}

TEST(Group, BlamesAFreshErrorWhenItsTimeIsUp) {
  Meeting meeting(2);
  const auto errors = errors_of_ranks(2, [&](const World& world) {
    const auto board = std::make_shared<world::FailureBoard>(world, "board", kLong);
    Group group(world, Team::whole(world), "test", {.timeout = milliseconds(700), .board = board});
    if (world.rank == 1) board->report_error("raised ValueError in forward", "out of ideas");
    meeting.arrive();
    std::string text;
    try {
      if (world.rank == 0) group.barrier(kHere);
    } catch (const CommError& error) {
      text = error.what();
    }
    meeting.arrive();
    if (!text.empty()) throw CommError(text);
  });
  EXPECT_NE(errors[0].find("timed out after 0.7"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("rank 1 raised ValueError in forward: out of ideas"), std::string::npos) << errors[0];
}

/// A transfer whose connection has broken.
class Broken : public Operation {
 public:
  bool ready() override { return false; }
  bool advance(milliseconds) override { throw TransportError("connection reset"); }
};

// A diagnosis takes a third of a second and overwrites this rank's place: neither must happen when the cause is known.
TEST(Group, DiagnosesALostPeerOnlyIfNoRankReportedTheCause) {
  for (const bool reported : {true, false}) {
    const auto errors = errors_of_ranks(2, [&](const World& world) {
      const auto board = board_of(world);
      Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board});
      if (world.rank == 1 && reported) board->report_failure("failed in forward: out of ideas");
      group.barrier(kHere);
      if (world.rank == 1) return;
      auto pending = group.track(std::make_shared<Broken>(), "all-gather", 4);
      try {
        group.wait(pending, kHere);
      } catch (const CommError&) {
        EXPECT_EQ(world.store->check({"board/place/0"}), !reported);
        throw;
      }
    });
    EXPECT_NE(errors[0].find("connection reset"), std::string::npos) << errors[0];
    EXPECT_EQ(errors[0].find("out of ideas") != std::string::npos, reported) << errors[0];
  }
}

TEST(Group, FinishesWhatAPeerDidBeforeItEnded) {
  run_ranks(2, [](const World& world) {
    const auto board = board_of(world);
    const Tensor out = at::empty({2});
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board});
    if (world.rank == 0) {
      board->report_end("has ended training");  // says so at once, its part comes later
      std::this_thread::sleep_for(4 * world::kPollFailures);
    }
    auto pending = group.all_gather(out, iota(world.rank, 1));
    if (world.rank == 1) group.wait(pending, kHere);
    while (!pending.ready()) std::this_thread::yield();
    EXPECT_TRUE(at::equal(out, iota(0, 2)));
  });
}

TEST(Group, NotesALateCompletionAsSuccess) {
  // Limits that lapse at about the moment of completion: lateness must never read as a lost peer.
  run_ranks(2, [](const World& world) {
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
    std::mt19937 random(world.rank);
    for (int i = 0; i < 300; ++i) {
      const Tensor out = at::empty({2});
      auto pending = group.all_gather(out, iota(world.rank, 1));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      while (!group.wait_for(pending, milliseconds(1), kHere)) {
      }
      ASSERT_TRUE(at::equal(out, iota(0, 2)));
    }
  });
}

TEST(Group, NamesTheRankThatCouldNotConnect) {
  const auto errors = errors_of_ranks(2, [](const World& world) {
    if (world.rank == 1) return;
    World patient = world;
    Group group(patient, Team::whole(patient), "test", {.timeout = milliseconds(1000), .board = board_of(world)});
  });
  EXPECT_EQ(errors[0].find("rank 0 of 2 could not connect group 'test' within 1000 ms"), 0u) << errors[0];
  EXPECT_NE(errors[0].find("GLOO_SOCKET_IFNAME"), std::string::npos);
}

TEST(Group, WaitsWithinTheInstalledRegion) {
  static std::atomic<int> entered{0};
  set_blocking_region([](const std::function<void()>& wait) {
    ++entered;
    wait();
  });
  run_ranks(2, [](const World& world) {
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
    const Tensor out = at::empty({2});
    auto pending = group.all_gather(out, iota(world.rank, 1));
    group.wait(pending, kHere);
  });
  set_blocking_region(nullptr);
  EXPECT_GE(entered, 4) << "connecting and waiting, on two ranks";
}

TEST(Rounds, TellsEveryRankEveryMessageRoundAfterRound) {
  for (int size : {1, 2, 4}) {
    run_ranks(size, [&](const World& world) {
      Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board_of(world)});
      Rounds rounds(control);
      for (int round = 0; round < 20; ++round) {
        const bool closes = round % 2 != 0;
        Word own = Close{.joined = world.rank == 1, .rounds = 100 * round + world.rank};
        if (!closes) own = Wishes{.num_needs = 1, .num_wishes = 1, .units = {100 * round + world.rank, 7}};
        EXPECT_FALSE(rounds.posted());
        rounds.post(own);
        own = Wishes{};  // posted by value
        EXPECT_TRUE(rounds.posted());
        const auto words = rounds.collect(kHere);
        ASSERT_EQ(static_cast<int>(words.size()), size);
        for (int r = 0; r < size; ++r) {
          if (closes) {
            EXPECT_EQ(std::get<Close>(words[r]).rounds, 100 * round + r);
            EXPECT_EQ(std::get<Close>(words[r]).joined, r == 1);
          } else {
            EXPECT_EQ(std::get<Wishes>(words[r]).needs().front(), 100 * round + r);
            EXPECT_EQ(std::get<Wishes>(words[r]).wishes().front(), 7);
          }
        }
        EXPECT_EQ(rounds.count(), round + 1);
      }
    });
  }
}

TEST(Rounds, RefusesASecondRoundAtOnce) {
  run_ranks(1, [](const World& world) {
    Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board_of(world)});
    Rounds rounds(control);
    EXPECT_ANY_THROW(rounds.collect(kHere));
    rounds.post({});
    EXPECT_ANY_THROW(rounds.post({}));
    EXPECT_ANY_THROW(rounds.exchange(Vote{}, kHere)) << "a round is under way";
    EXPECT_EQ(rounds.collect(kHere).size(), 1u);
    EXPECT_EQ(rounds.exchange(Vote{.digest = 3}, kHere).front().digest, 3u);
  });
}

}  // namespace
}  // namespace deeptide::comm
