// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Slots are refilled only after all have read them, sleepers wake, counts wrap; which ranks count as one host.
#include "host/ring.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstring>
#include <random>

#include "host/transfer.h"
#include "on_hosts.h"

namespace deeptide::host {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kEnough{30'000};

struct Case {
  int size;
  uint32_t first;
};

class Rings : public testing::TestWithParam<Case> {};

TEST_P(Rings, ShowEverySlotToAllBeforeItIsFilledAgain) {
  const auto [size, first] = GetParam();
  Meeting meeting(size);
  run_ranks(size, [&, first = first](const World& world) {
    Ring ring(Host::find(world, "host", true), 4, 64);
    ring.start_at(first);
    meeting.arrive();
    uint32_t num_read = 0;
    const auto read_all = [&](uint32_t count) {
      for (; num_read < count; ++num_read) {
        ASSERT_TRUE(ring.wait_posted(first + num_read, kEnough));
        ASSERT_TRUE(ring.all_posted(first + num_read));
        for (int peer = 0; peer < size; ++peer) {
          uint32_t seen = 0;
          std::memcpy(&seen, ring.slot(peer, first + num_read), sizeof(seen));
          ASSERT_EQ(seen, 1000 * num_read + static_cast<uint32_t>(peer));
        }
        ring.set_read(first + num_read);
      }
    };
    std::mt19937 random(world.rank);
    for (uint32_t i = 0; i < 50; ++i) {
      char* slot = ring.next_slot();
      if (slot == nullptr) {
        read_all(i);
        ASSERT_TRUE(ring.wait_read(ring.num_posted() - 4, kEnough));
        slot = ring.next_slot();
        ASSERT_NE(slot, nullptr);
      }
      const uint32_t own = 1000 * i + static_cast<uint32_t>(world.rank);
      std::memcpy(slot, &own, sizeof(own));
      ASSERT_EQ(ring.post(), first + i);
      if (random() % 3 == 0) read_all(i + 1);
    }
    read_all(50);
    EXPECT_TRUE(ring.wait_read(first + 49, kEnough));
    EXPECT_TRUE(ring.all_read(first + 49));
    EXPECT_FALSE(ring.all_read(first + 50));
    EXPECT_FALSE(ring.is_posted(0, first + 50));
  });
}

TEST_P(Rings, CarryTransfersOfAnySizeThroughSmallSlots) {
  const auto [size, first] = GetParam();
  Meeting meeting(size);
  run_ranks(size, [&, first = first](const World& world) {
    auto ring = std::make_shared<Ring>(Host::find(world, "host", true), 2, 16);
    ring->start_at(first);
    meeting.arrive();
    Channel channel(ring);
    for (const int64_t bytes : {0, 1, 15, 16, 17, 31, 32, 33, 100}) {
      std::vector<std::string> seen(size);
      const std::string own(static_cast<size_t>(bytes), static_cast<char>('a' + world.rank));
      const auto take = [&](const Pieces& pieces) {
        for (int peer = 0; peer < size; ++peer) {
          EXPECT_EQ(pieces.offset, static_cast<int64_t>(seen[peer].size()));
          seen[peer].append(pieces.data[peer], static_cast<size_t>(pieces.bytes));
        }
      };
      auto operation = channel.start({{}, own.data(), bytes, take});
      ASSERT_TRUE(operation->advance(kEnough));
      EXPECT_TRUE(operation->ready()) << "stays done";
      for (int peer = 0; peer < size; ++peer) {
        EXPECT_EQ(seen[peer], std::string(static_cast<size_t>(bytes), static_cast<char>('a' + peer)));
      }
    }
  });
}

TEST_P(Rings, CopyNothingThatOnlyTheSenderReads) {
  const auto [size, first] = GetParam();
  Meeting meeting(size);
  run_ranks(size, [&, first = first](const World& world) {
    auto ring = std::make_shared<Ring>(Host::find(world, "host", true), 4, 16);
    ring->start_at(first);
    meeting.arrive();
    Channel channel(ring);
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, 40}, {3, 37}, {16, 32}, {20, 21}}) {
      const std::string own(40, static_cast<char>('a' + world.rank));
      std::vector<std::string> seen(size);
      const auto take = [&](const Pieces& pieces) {
        for (int peer = 0; peer < size; ++peer) seen[peer].append(pieces.data[peer], pieces.bytes);
      };
      ASSERT_TRUE(channel.start({{}, own.data(), 40, take, begin, end})->advance(kEnough));
      EXPECT_EQ(seen[world.rank], own);
      for (int peer = 0; peer < size; ++peer) {
        const std::string sent(40, static_cast<char>('a' + peer));
        EXPECT_EQ(seen[peer].substr(0, begin), sent.substr(0, begin));
        EXPECT_EQ(seen[peer].substr(end), sent.substr(end));
        // At first slots hold zeros.
        if (peer != world.rank && end - begin == 40) {
          EXPECT_EQ(seen[peer], std::string(40, '\0'));
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Rings,
                         testing::Values(Case{2, 0}, Case{3, 0}, Case{8, 0}, Case{2, ~0u - 20},
                                         Case{3, (1u << 31) - 20}, Case{4, ~0u}));

TEST(HostRing, FillsNoSlotThatSomebodyHasNotRead) {
  Meeting meeting(2);
  run_ranks(2, [&](const World& world) {
    Ring ring(Host::find(world, "host", true), 2, 8);
    EXPECT_NE(ring.next_slot(), nullptr);
    ring.post();
    ring.post();
    EXPECT_EQ(ring.next_slot(), nullptr);
    ring.set_read(1);
    meeting.arrive();
    EXPECT_NE(ring.next_slot(), nullptr);
    meeting.arrive();
    if (world.rank == 1) ring.set_read(1);
    ring.post();
    EXPECT_NE(ring.next_slot(), nullptr) << "one is posted anew, the other is free";
    ring.post();
    EXPECT_EQ(ring.next_slot(), nullptr);
  });
}

TEST(HostRing, GivesUpWhenTheTimeIsUp) {
  run_ranks(2, [](const World& world) {
    Ring ring(Host::find(world, "host", true), 2, 8);
    const auto begin = steady_clock::now();
    EXPECT_FALSE(ring.wait_posted(0, milliseconds(60)));
    EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
    EXPECT_FALSE(ring.wait_posted(0, milliseconds(0)));
    EXPECT_FALSE(ring.wait_read(0, milliseconds(0)));
  });
}

TEST(HostRing, WakesSleepersAtOnce) {
  // A lost wake-up would last the whole limit, and the wait would still succeed, so only the time shows it.
  run_ranks(2, [](const World& world) {
    Ring ring(Host::find(world, "host", true), 2, 8);
    std::mt19937 random(7 + world.rank);
    auto longest = steady_clock::duration::zero();
    for (uint32_t i = 0; i < 3000; ++i) {
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
      if (i >= 2) {
        ASSERT_TRUE(ring.wait_read(i - 2, kEnough));
      }
      const auto begin = steady_clock::now();
      ring.post();
      ASSERT_TRUE(ring.wait_posted(i, kEnough));
      ring.set_read(i);
      longest = std::max(longest, steady_clock::now() - begin);
    }
    EXPECT_LT(longest, kEnough / 2);
  });
}

TEST(HostRing, WorksWithManyMoreRanksThanCores) {
  run_ranks(8, [](const World& world) {
    cpu_set_t one;
    CPU_ZERO(&one);
    cpu_set_t allowed;
    ASSERT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
      if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
    }
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);  // of this thread
    Ring ring(Host::find(world, "host", true), 2, 8);
    for (uint32_t i = 0; i < 200; ++i) {
      if (i >= 2) {
        ASSERT_TRUE(ring.wait_read(i - 2, kEnough));
      }
      ring.post();
      ASSERT_TRUE(ring.wait_posted(i, kEnough));
      ring.set_read(i);
    }
  });
}

TEST(Host, IsWhereRanksBearTheSameName) {
  for (const auto& [names, text] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"a b", "a b"}, "1 host of 2 ranks, shared memory"},
           {{"a b", "a c"}, "no two ranks share memory, network"},
           {{"a\nb", "a\nb"}, "1 host of 2 ranks, shared memory"},
           {{"", ""}, "1 host of 2 ranks, shared memory"},
           {{"", "", "elsewhere"}, "2 hosts of 2 and 1 ranks, network"},
           {{"a", "b", "a", "b"}, "2 hosts of 2 ranks, shared memory within"},
           {{"a", "a", "b", "c", "c", "c"}, "3 hosts of 2, 1 and 3 ranks, network"}}) {
    run_ranks(static_cast<int>(names.size()), [&](World world) {
      world.host = names[world.rank];
      const auto host = Host::find(world, "host", true);
      EXPECT_EQ(host->text(), text);
      EXPECT_EQ(host->ranks()[host->index()], world.rank);
      EXPECT_EQ(host->hosts()[host->host_index()], host->ranks());
      EXPECT_EQ(host->find_dead(), std::nullopt);
    });
  }
}

TEST(Host, HoldsItsRanksApartWhenOneWantsThemSo) {
  run_ranks(3, [](const World& world) {
    const auto host = Host::find(world, "host", world.rank != 1);
    EXPECT_EQ(host->text(), "no two ranks share memory, network");
    EXPECT_EQ(host->ranks(), std::vector<int>{world.rank});
    EXPECT_EQ(host->hosts().size(), 3u);
  });
}

TEST(Host, SharesNothingWhenOneRankDoesNotPassTheCheck) {
  run_ranks(3, [](const World& world) {
    const auto host = Host::find(world, "host", true);
    std::string why_not;
    const auto memory = host->share(4096, why_not, [&](const auto&) {
      if (world.rank == 2) throw std::runtime_error("not here\nat all");
    });
    EXPECT_EQ(memory, nullptr);
    EXPECT_EQ(why_not, "rank 2: not here");
    EXPECT_NE(host->share(4096, why_not = ""), nullptr) << "and does so the next time";
  });
}

TEST(Host, WaitsForNobodyWhoHasSaidThatItCannotGoOn) {
  const auto begin = steady_clock::now();
  const auto errors = errors_of_ranks(2, [](const World& world) {
    const auto board = board_of(world);
    const auto host = Host::find(world, "host", true, board);
    if (world.rank == 1) return board->report_failure("failed in initialize; see its error");
    std::string why_not;
    host->share(4096, why_not);
  });
  EXPECT_EQ(errors[0], "rank 1 failed in initialize; see its error");
  EXPECT_LT(steady_clock::now() - begin, kEnough);
}

TEST(Host, SaysWhenRanksDoNotCome) {
  const auto errors = errors_of_ranks(2, [](const World& world) {
    if (world.rank == 1) return;
    world.store->setTimeout(milliseconds(300));
    Host::find(world, "host", true);
  });
  EXPECT_NE(errors[0].find("rank 0 of 2 could not learn where the other ranks run"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace deeptide::host
