// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Under a limit that ranks share, what one of them keeps idle goes before another is refused, or killed.
#include "host/memory_appeal.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "base/sanitizers.h"
#include "control_group.h"
#include "deeptide/allocator.h"
#include "host/arena.h"
#include "on_hosts.h"
#include "processes.h"

#ifndef DEEPTIDE_SANITIZED  // there is no heap of ours under sanitizers

namespace deeptide::host {
namespace {

using at::Tensor;
using device::Role;

constexpr int64_t kMiB = 1 << 20;
const comm::Site kMeeting{"backward", "reducing unit 'h.3'"};

/// Leaves `bytes` in this process's heap that nothing uses.
void leave_idle(int64_t bytes) {
  at::ones({bytes}, at::kByte);
  TORCH_CHECK(cpu_allocator_stats().idle_bytes >= bytes, cpu_allocator_stats().idle_bytes, " idle");
}

struct Neighbours {
  explicit Neighbours(const World& world)
      : host(Host::find(world, "host", true)),
        group(world, comm::Team::whole(world), "test",
              {.timeout = kLong, .board = board_of(world), .host = host, .clock = clock_at(7)}) {
    TORCH_CHECK(host->holds_all(), host->text());
  }
  void barrier() { group.barrier(kMeeting); }

  std::shared_ptr<Host> host;
  comm::Group group;
};

void expect_no_errors(RankProcesses& ranks) {
  for (const auto& outcome : ranks.wait(std::chrono::seconds(60))) {
    EXPECT_TRUE(outcome.ended_in_time);
    EXPECT_FALSE(outcome.killed) << "by the kernel, which had no memory left";
    EXPECT_EQ(outcome.error, "");
  }
}

TEST(MemoryAppeal, IsAnsweredWhateverTheOtherRankDoes) {
  RankProcesses ranks(3, [](const World& world) {
    install_cpu_allocator();
    Neighbours ranks(world);
    leave_idle(40 * kMiB);
    ranks.barrier();
    if (world.rank == 0) {
      TORCH_CHECK(device::release_idle_of_others());
      ranks.barrier();
      TORCH_CHECK(cpu_allocator_stats().idle_bytes >= 40 * kMiB, "its own was not asked for");
    } else {
      ranks.barrier();  // in which it waits for rank 0
      TORCH_CHECK(cpu_allocator_stats().idle_bytes == 0, cpu_allocator_stats().idle_bytes, " bytes are idle still");
    }
  });
  expect_no_errors(ranks);
}

TEST(MemoryAppeal, WaitsForNoRankThatHasEnded) {
  RankProcesses ranks(2, [](const World& world) {
    install_cpu_allocator();
    {
      Neighbours ranks(world);
      ranks.barrier();
      if (world.rank == 1) ::_exit(0);
      const auto begin = std::chrono::steady_clock::now();
      while (!ranks.host->find_dead()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      TORCH_CHECK(!device::release_idle_of_others());
      TORCH_CHECK(std::chrono::steady_clock::now() - begin < kLong);
    }
    TORCH_CHECK(!device::release_idle_of_others(), "nobody is left to ask");
  });
  expect_no_errors(ranks);
}

/// Rank 1 leaves half of what the group may have idle, then rank 0 runs `take` of two thirds.
void expect_room_for(const std::function<Tensor(Neighbours&)>& take) {
  const ControlGroup small(300 * kMiB);
  if (!small.is_there()) GTEST_SKIP() << "no control group for memory can be made";
  RankProcesses ranks(2, [&](const World& world) {
    TORCH_CHECK(small.enter());
    install_cpu_allocator();
    Neighbours ranks(world);
    if (world.rank == 1) leave_idle(150 * kMiB);
    ranks.barrier();
    if (world.rank == 0) {
      const Tensor taken = take(ranks);
      TORCH_CHECK(taken.const_data_ptr<uint8_t>()[taken.numel() - 1] == 1);
    }
    ranks.barrier();
  });
  expect_no_errors(ranks);
}

Tensor filled(Tensor taken) { return taken.fill_(1); }

TEST(MemoryAppeal, MakesRoomForATensorUnderALimit) {
  expect_room_for([](Neighbours&) { return at::ones({200 * kMiB}, at::kByte); });
}

TEST(MemoryAppeal, MakesRoomForABufferUnderALimit) {
  expect_room_for([](Neighbours&) {
    const auto ledger = std::make_shared<device::Ledger>();
    return filled(device::allocate_flat(ledger, Role::gradients, 200 * kMiB, at::kByte, at::kCPU));
  });
}

/// Both ranks look while there is room for one of them: the other is refused, and nobody is killed.
TEST(MemoryAppeal, LetsRanksTakeSharedMemoryOneAfterTheOther) {
  const ControlGroup small(300 * kMiB);
  if (!small.is_there()) GTEST_SKIP() << "no control group for memory can be made";
  RankProcesses ranks(2, [&](const World& world) {
    TORCH_CHECK(small.enter());
    Neighbours ranks(world);
    std::string why_not;
    const auto arena = Arena::create(*ranks.host, 4096, 400 * kMiB, why_not);
    TORCH_CHECK(arena, why_not);
    ranks.barrier();
    const Tensor taken = arena->allocate(std::make_shared<device::Ledger>(), Role::communication, 180 * kMiB);
    ranks.barrier();
  });
  int refused = 0;
  for (const auto& outcome : ranks.wait(std::chrono::seconds(60))) {
    EXPECT_TRUE(outcome.ended_in_time);
    EXPECT_FALSE(outcome.killed) << "by the kernel, which had no memory left";
    refused += outcome.error.find("cannot take 188743680 bytes of shared memory") != std::string::npos;
  }
  EXPECT_EQ(refused, 1);
}

/// A pool over the arena gives its idle buffers up, reserved ones too, before it is refused.
TEST(MemoryAppeal, IsNotNeededWhileAPoolHasIdleBuffers) {
  RankProcesses ranks(2, [](const World& world) {
    Neighbours ranks(world);
    std::string why_not;
    const auto arena = Arena::create(*ranks.host, 4096, 8 * kMiB, why_not);
    TORCH_CHECK(arena, why_not);
    const auto ledger = std::make_shared<device::Ledger>();
    device::BufferPool pool(ledger, Role::communication, at::kCPU, device::kDefaultMaxWaste,
                            [&](int64_t bytes, Role role) { return arena->allocate(ledger, role, bytes); });
    pool.reserve({5 * kMiB});
    pool.put(pool.take(5 * kMiB, at::kByte));
    pool.take(6 * kMiB, at::kByte);
    ranks.barrier();
  });
  expect_no_errors(ranks);
}

TEST(MemoryAppeal, MakesRoomForSharedMemoryUnderALimit) {
  expect_room_for([](Neighbours& ranks) {
    const auto memory = device::SharedMemory::create(200 * kMiB);
    memory->populate(0, 200 * kMiB);
    return filled(memory->view(0, 200 * kMiB, at::kByte));
  });
}

}  // namespace
}  // namespace deeptide::host

#endif
