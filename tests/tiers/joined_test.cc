// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two buffers read and written as one.
#include "tiers/joined.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tiers/copying_store.h"

namespace deeptide::tiers {
namespace {

using at::Tensor;

TEST(JoinedBuffer, LendsEachBlockFromWhereItLies) {
  const Tensor first = at::arange(8, at::kFloat), second = at::arange(8, 18, at::kFloat);
  const auto store = std::make_shared<CopyingStore>(second);
  const Buffer buffer = joined(Buffer::resident(first), Buffer(store, 10, at::kFloat, 4), 4);
  EXPECT_EQ(buffer.numel(), 18);
  EXPECT_FALSE(buffer.in_place().defined());
  EXPECT_TRUE(at::equal(buffer.copy(), at::arange(18, at::kFloat)));
  EXPECT_TRUE(at::equal(buffer.copy({5, 9}), at::arange(5, 14, at::kFloat)));
  {
    const Lease one = buffer.lease({2, 2}, Access::update), other = buffer.lease({13, 3}, Access::update);
    EXPECT_EQ(one.tensor().const_data_ptr(), first.const_data_ptr<float>() + 2) << "no copy";
    EXPECT_EQ(store->open_leases, 1);
    one.tensor().mul_(10);
    other.tensor().mul_(10);
  }
  EXPECT_EQ(store->open_leases, 0);
  EXPECT_EQ(first[3].item<float>(), 30);
  EXPECT_EQ(second[5].item<float>(), 130);
  buffer.copy_from(at::zeros({18}));
  EXPECT_FALSE(at::cat({first, second}).any().item<bool>());
  EXPECT_ANY_THROW(buffer.lease({6, 4}, Access::read)) << "it spans both";
}

TEST(JoinedBuffer, NeedsOneTypeAndWholeBlocks) {
  const Buffer eight = Buffer::resident(at::zeros({8})), shorts = Buffer::resident(at::zeros({8}, at::kShort));
  EXPECT_ANY_THROW(joined(eight, eight, 3));
  EXPECT_ANY_THROW(joined(eight, shorts, 4));
}

}  // namespace
}  // namespace deeptide::tiers
