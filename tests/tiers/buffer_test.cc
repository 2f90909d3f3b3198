// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Leases on resident memory, and on a store that lends copies of its blocks.
#include "tiers/buffer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <vector>

#include "tiers/copying_store.h"

namespace deeptide::tiers {
namespace {

using at::Tensor;

TEST(ResidentBuffer, LendsSlicesOfItsMemory) {
  const Tensor flat = at::arange(100, at::kFloat);
  const Buffer buffer = Buffer::resident(flat);
  EXPECT_EQ(buffer.num_blocks(), 1);
  EXPECT_EQ(buffer.block(0).count, 100);
  EXPECT_EQ(buffer.tier(), Tier::cpu);
  const Lease lease = buffer.lease({10, 5}, Access::update);
  EXPECT_EQ(lease.tensor().const_data_ptr(), flat.const_data_ptr<float>() + 10) << "no copy";
  lease.tensor().fill_(-1);
  EXPECT_EQ(flat[10].item<float>(), -1);
  EXPECT_EQ(flat[15].item<float>(), 15);
}

TEST(ResidentBuffer, MayBeEmpty) {
  const Buffer buffer = Buffer::resident(at::empty({0}));
  EXPECT_EQ(buffer.num_blocks(), 0);
  EXPECT_EQ(buffer.lease({0, 0}, Access::read).tensor().numel(), 0);
}

TEST(Buffer, EndsEachLeaseOnceWhereverItMoves) {
  auto store = std::make_shared<CopyingStore>(at::arange(10, at::kFloat));
  const Buffer buffer(store, 10, at::kFloat, 4);
  {
    Lease first = buffer.lease({0, 4}, Access::read);
    Lease moved = std::move(first);
    EXPECT_EQ(store->open_leases, 1);
    moved = buffer.lease({4, 4}, Access::read);
    EXPECT_EQ(store->open_leases, 1);
  }
  EXPECT_EQ(store->open_leases, 0);
}

TEST(Buffer, KeepsWhatAWritingLeaseWroteOnly) {
  const Tensor flat = at::arange(10, at::kFloat);
  const Buffer buffer(std::make_shared<CopyingStore>(flat), 10, at::kFloat, 4);
  buffer.lease({0, 4}, Access::read).tensor().fill_(7);
  EXPECT_EQ(flat[0].item<float>(), 0) << "a reader changes nothing";
  buffer.lease({4, 4}, Access::update).tensor().mul_(2);
  EXPECT_EQ(flat[5].item<float>(), 10);
  buffer.lease({8, 2}, Access::write).tensor().fill_(3);
  EXPECT_EQ(flat[9].item<float>(), 3);
}

TEST(Buffer, RefusesALeaseAcrossBlocksOrPastTheEnd) {
  const Buffer buffer(std::make_shared<CopyingStore>(at::arange(10, at::kFloat)), 10, at::kFloat, 4);
  EXPECT_EQ(buffer.num_blocks(), 3);
  EXPECT_EQ(buffer.block(2).count, 2);
  EXPECT_ANY_THROW(buffer.lease({3, 2}, Access::read));
  EXPECT_ANY_THROW(buffer.lease({8, 3}, Access::read));
}

TEST(Blocks, AreCutWhereAnyBufferEndsOne) {
  const auto make = [](int64_t block_numel) {
    return Buffer(std::make_shared<CopyingStore>(at::arange(20, at::kFloat)), 20, at::kFloat, block_numel);
  };
  const Buffer fours = make(4), sixes = make(6), absent;
  std::vector<int64_t> begins;
  int64_t covered = 0;
  const Buffer* const buffers[] = {&fours, &sixes, &absent};
  for_each_block(std::span<const Buffer* const>(buffers), {3, 14}, [&](Block block) {
    begins.push_back(block.begin);
    covered += block.count;
    EXPECT_NO_THROW(fours.lease(block, Access::read));
    EXPECT_NO_THROW(sixes.lease(block, Access::read));
  });
  EXPECT_EQ(begins, (std::vector<int64_t>{3, 4, 6, 8, 12, 16}));
  EXPECT_EQ(covered, 14);
}

}  // namespace
}  // namespace deeptide::tiers
