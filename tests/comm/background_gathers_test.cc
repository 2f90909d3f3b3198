// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gathers that end though no rank waits for them, in order, and share their group.
#include "comm/background_gathers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "on_hosts.h"

namespace deeptide::comm {
namespace {

using at::Tensor;

constexpr int kGathers = 7;
constexpr int64_t kNumel = 5000;

TEST(BackgroundGathers, EndThoughNoRankWaits) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 0}, {0, 0, 1, 1}, {0, 1, 1, 0}, {0, 1, 2}}) {
    for (const int64_t most_bytes : {int64_t{1}, int64_t{50'000}, int64_t{1} << 30}) {
      std::atomic<int> ended{0};
      run_on_hosts(hosts, [&](const World& world) {
        const auto host = host::Host::find(world, "host", true);
        Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
        BackgroundGathers gathers(group, most_bytes);
        std::vector<Tensor> outputs;
        std::vector<OperationPtr> operations;
        for (int i = 0; i < kGathers; ++i) {
          outputs.push_back(at::empty({world.size * kNumel}));
          operations.push_back(
              gathers.add(outputs.back(), at::full({kNumel}, static_cast<float>(100 * i + world.rank))));
        }
        // Rank 0 waits for the last alone; the others for nothing, until rank 0 has it.
        if (world.rank == 0) {
          while (!operations.back()->advance(kLong)) {
          }
          for (const auto& operation : operations) EXPECT_TRUE(operation->ready()) << "they end in their order";
          ended = 1;
        }
        while (ended == 0) std::this_thread::yield();
        for (int i = 0; i < kGathers; ++i) {
          while (!operations[i]->advance(kLong)) {
          }
          for (int peer = 0; peer < world.size; ++peer) {
            const Tensor row = outputs[i].narrow(0, peer * kNumel, kNumel);
            EXPECT_TRUE(at::equal(row, at::full({kNumel}, 100.0f * static_cast<float>(i) + peer))) << i << ", " << peer;
          }
        }
      });
    }
  }
}

TEST(BackgroundGathers, ShareTheirGroupOnceAllHaveEnded) {
  run_on_hosts({0, 0, 1, 1}, [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
    BackgroundGathers gathers(group, 1);
    for (int round = 0; round < 3; ++round) {
      const Tensor output = at::empty({world.size * 3});
      Pending pending(gathers.add(output, at::full({3}, static_cast<float>(world.rank))));
      group.wait(pending, {"test", "waiting for a gather"});
      group.barrier({"test", "a collective of the test's own"});
      EXPECT_EQ(output.sum().item<float>(), 3.0f * 6);
    }
  });
}

TEST(BackgroundGathers, GiveUpWhatIsUnderWayWhenTheyEnd) {
  run_on_hosts({0, 0}, [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    const auto board = board_of(world);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board, .host = host});
    if (world.rank == 1) return;
    const Tensor output = at::empty({2 * kNumel});
    BackgroundGathers gathers(group, 1);
    const auto operation = gathers.add(output, at::full({kNumel}, 1.0f));
    EXPECT_FALSE(operation->advance(std::chrono::milliseconds(50))) << "rank 1 adds none";
  });
}

}  // namespace
}  // namespace deeptide::comm
