// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The arena that ranks of a host share, and buffers in it that are read in place.
#include "host/exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <random>

#include "comm/transport/ordered_rows.h"
#include "on_hosts.h"

namespace deeptide::host {
namespace {

using at::Tensor;
using device::Ledger;
using device::Role;

constexpr int64_t kLarge = 2 << 20;
const comm::Site kHere{"backward", "testing"};

std::shared_ptr<Arena> make_arena(Host& host, int64_t parameters = kLarge, int64_t heap = 8 << 20) {
  std::string why_not;
  auto arena = Arena::create(host, parameters, heap, why_not);
  EXPECT_NE(arena, nullptr) << why_not;
  return arena;
}

/// An arena needs two ranks; the test uses that of one.
void with_arena(const std::function<void(Arena&)>& test) {
  run_ranks(2, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    const auto arena = make_arena(*host);
    if (world.rank == 1) test(*arena);
  });
}

TEST(HostArena, LaysBuffersOnBoundariesAndCountsThem) {
  with_arena([](Arena& arena) {
    const auto ledger = std::make_shared<Ledger>();
    int64_t total = 0;
    std::vector<Tensor> buffers;
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{5000}, kLarge - 1, kLarge, int64_t{100}}) {
      buffers.push_back(arena.allocate(ledger, Role::communication, bytes));
      EXPECT_EQ(buffers.back().numel(), bytes);
      total += bytes;
      EXPECT_EQ(ledger->current(Role::communication), total);
      if (bytes == 0) continue;
      EXPECT_EQ(arena.offset_of(buffers.back()) % (bytes >= kLarge ? kLarge : device::page_size()), 0);
      EXPECT_GE(arena.offset_of(buffers.back()), kLarge + (8 << 20)) << "its own heap lies behind the other's";
    }
    for (const Tensor& one : buffers) {
      for (const Tensor& other : buffers) {
        if (one.is_same(other) || one.numel() == 0 || other.numel() == 0) continue;
        const int64_t a = arena.offset_of(one), b = arena.offset_of(other);
        EXPECT_TRUE(a + one.numel() <= b || b + other.numel() <= a);
      }
    }
    buffers.clear();
    EXPECT_EQ(ledger->current(Role::communication), 0);
    EXPECT_EQ(ledger->peak(Role::communication), total);
  });
}

TEST(HostArena, TakesBackWhatIsLetGoAndItsPages) {
  with_arena([](Arena& arena) {
    const auto ledger = std::make_shared<Ledger>();
    Tensor first = arena.allocate(ledger, Role::communication, 5000);
    const int64_t offset = arena.offset_of(first);
    first.fill_(7);
    const Tensor part = first.narrow(0, 4000, 100);
    first = Tensor();
    EXPECT_EQ(part[0].item<int>(), 7) << "still held";
    EXPECT_NE(arena.offset_of(arena.allocate(ledger, Role::communication, 5000)), offset);
  });
  with_arena([](Arena& arena) {
    const auto ledger = std::make_shared<Ledger>();
    int64_t offset = 0;
    {
      const Tensor first = arena.allocate(ledger, Role::communication, 5000);
      offset = arena.offset_of(first);
      first.fill_(7);
    }
    const Tensor again = arena.allocate(ledger, Role::communication, 5000);
    EXPECT_EQ(arena.offset_of(again), offset);
    EXPECT_TRUE(at::equal(again, at::full({5000}, 0, at::kByte)));
  });
}

TEST(HostArena, SaysWhenItIsFullAndJoinsWhatComesBack) {
  with_arena([](Arena& arena) {
    const auto ledger = std::make_shared<Ledger>();
    std::vector<Tensor> buffers;
    for (int i = 0; i < 4; ++i) buffers.push_back(arena.allocate(ledger, Role::communication, kLarge));
    try {
      arena.allocate(ledger, Role::communication, 1);
      FAIL() << "more than there is";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("8388608 bytes of shared memory"), std::string::npos) << error.what();
    }
    EXPECT_EQ(ledger->current(Role::communication), 4 * kLarge) << "what failed is not counted";
    for (const int i : {1, 3, 0, 2}) buffers[i] = Tensor();
    EXPECT_NO_THROW(arena.allocate(ledger, Role::communication, 4 * kLarge)) << "in one piece";
  });
}

TEST(HostArena, GivesNoPlaceTwiceWhenThreadsComeAndGo) {
  with_arena([](Arena& arena) {
    const auto ledger = std::make_shared<Ledger>();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        std::vector<Tensor> held;
        for (int i = 0; i < 300; ++i) {
          const auto bytes = static_cast<int64_t>(random() % 20000) + 1;
          held.push_back(arena.allocate(ledger, Role::communication, bytes));
          held.back().fill_(t);
          if (held.size() < 20) continue;
          const size_t out = random() % held.size();
          ASSERT_TRUE(at::equal(held[out], at::full(held[out].sizes(), t, at::kByte)));
          held.erase(held.begin() + static_cast<int64_t>(out));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(ledger->current(Role::communication), 0);
    EXPECT_NO_THROW(arena.allocate(ledger, Role::communication, 8 << 20)) << "all came back";
  });
}

TEST(HostArena, OutlivesItsOwnersForAsLongAsABufferLives) {
  Tensor kept;
  const auto ledger = std::make_shared<Ledger>();
  with_arena([&](Arena& arena) { kept = arena.allocate(ledger, Role::communication, 100).fill_(3); });
  EXPECT_EQ(kept[99].item<int>(), 3);
  EXPECT_EQ(ledger->current(Role::communication), 100);
  kept = Tensor();
  EXPECT_EQ(ledger->current(Role::communication), 0);
}

TEST(HostArena, KnowsItsOwn) {
  with_arena([](Arena& arena) { EXPECT_ANY_THROW(arena.offset_of(at::empty({4}))); });
}

class Exchanges : public testing::TestWithParam<int> {};

TEST_P(Exchanges, ShowEverybodysSliceInRankOrderUntilAllHaveReadIt) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board_of(world), .host = host});
    const auto ledger = std::make_shared<Ledger>();
    Exchange exchange(host, make_arena(*host));
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t shard : {0, 1, 33, 1000}) {
        std::vector<Tensor> buffers;
        std::vector<Exchange::Offer> offers;
        for (int i = 0; i < 3; ++i) {  // several under way
          const int64_t bytes = size * shard * static_cast<int64_t>(c10::elementSize(dtype));
          buffers.push_back(exchange.arena().allocate(ledger, Role::communication, bytes).view(dtype));
          buffers.back().copy_(at::arange(size * shard, at::kFloat) / 3.0 + world.rank + 10 * i);
          offers.push_back(exchange.offer(buffers.back()));
        }
        const Tensor through_slots = at::empty({size * shard}, dtype);
        for (int i = 0; i < 3; ++i) {
          auto pending = group.track(offers[i].operation, "reduce-scatter", 0);
          group.wait(pending, kHere);
          const auto rows = exchange.rows(offers[i].number, world.rank * shard, shard, dtype);
          ASSERT_EQ(static_cast<int>(rows.size()), size);
          pending = group.all_to_all(through_slots, buffers[i]);
          group.wait(pending, kHere);
          for (int peer = 0; peer < size; ++peer) {
            EXPECT_TRUE(at::equal(rows[peer], through_slots.narrow(0, peer * shard, shard)));
          }
          if (world.rank == 0) {
            EXPECT_FALSE(exchange.all_read(offers[i].number)) << "not by this one";
          }
          exchange.set_read(offers[i].number);
        }
        group.barrier(kHere);
        EXPECT_TRUE(exchange.all_read(offers.back().number));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Exchanges, testing::Values(2, 3, 4, 8));

TEST(HostExchange, TellsWhenAnotherRankIsFarBehind) {
  Meeting meeting(2);
  run_ranks(2, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    Exchange exchange(host, make_arena(*host));
    const auto ledger = std::make_shared<Ledger>();
    if (world.rank == 0) {
      const Tensor flat = exchange.arena().allocate(ledger, Role::communication, 64);
      for (int i = 0; i < 4096; ++i) exchange.offer(flat);
      try {
        exchange.offer(flat);
        ADD_FAILURE() << "no end";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("4096 reductions are under way"), std::string::npos) << error.what();
      }
    }
    meeting.arrive();
  });
}

TEST(HostExchange, WaitsForReadersAsLongAsItIsTold) {
  Meeting meeting(2);
  run_ranks(2, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    Exchange exchange(host, make_arena(*host));
    const auto ledger = std::make_shared<Ledger>();
    const auto offer = exchange.offer(exchange.arena().allocate(ledger, Role::communication, 64));
    if (world.rank == 0) {
      exchange.set_read(offer.number);
      EXPECT_FALSE(exchange.wait_read(offer.number, std::chrono::milliseconds(1)));
    }
    meeting.arrive();
    if (world.rank == 1) {
      exchange.set_read(offer.number);
    } else {
      EXPECT_TRUE(exchange.wait_read(offer.number, kLong));
    }
  });
}

TEST(HostExchange, RefusesRowsBeyondWhatWasOffered) {
  run_ranks(2, [&](const World& world) {
    const auto host = Host::find(world, "host", true);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board_of(world), .host = host});
    Exchange exchange(host, make_arena(*host));
    const auto ledger = std::make_shared<Ledger>();
    const Tensor flat = exchange.arena().allocate(ledger, Role::communication, world.rank == 0 ? 64 : 32);
    auto offer = exchange.offer(flat);
    auto pending = group.track(offer.operation, "reduce-scatter", 0);
    group.wait(pending, kHere);
    EXPECT_ANY_THROW(exchange.rows(offer.number, 0, 16, at::kFloat)) << "the other offered less";
    EXPECT_EQ(exchange.rows(offer.number, 0, 8, at::kFloat).size(), 2u);
    group.barrier(kHere);
  });
}

}  // namespace
}  // namespace deeptide::host
