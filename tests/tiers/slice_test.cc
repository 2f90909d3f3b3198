// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A part of a buffer, read and written as one.
#include "tiers/slice.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tiers/copying_store.h"

namespace deeptide::tiers {
namespace {

using at::Tensor;

TEST(Slice, OfMemoryIsMemory) {
  const Tensor flat = at::arange(8, at::kFloat);
  const Buffer part = slice(Buffer::resident(flat), {2, 5});
  EXPECT_EQ(part.in_place().const_data_ptr(), flat.const_data_ptr<float>() + 2);
  EXPECT_EQ(part.resident_bytes(), 20);
  EXPECT_EQ(slice(Buffer::resident(flat), {0, 8}).in_place().const_data_ptr(), flat.const_data_ptr());
  EXPECT_ANY_THROW(slice(part, {2, 4})) << "it ends behind the buffer";
}

TEST(Slice, CutsItsBlocksWhereThoseOfTheWholeEnd) {
  for (const int64_t begin : {0, 2, 4, 6, 12}) {
    const Tensor flat = at::arange(18, at::kFloat);
    const auto store = std::make_shared<CopyingStore>(flat);
    const Buffer part = slice(Buffer(store, 18, at::kFloat, 4), {begin, 18 - begin});
    EXPECT_EQ(part.numel(), 18 - begin);
    EXPECT_EQ(part.tier(), Tier::nvme);
    EXPECT_EQ(part.resident_bytes(), 0);
    EXPECT_EQ(part.block_numel(), begin % 4 == 0 ? 4 : 2);
    EXPECT_TRUE(at::equal(part.copy(), at::arange(begin, 18, at::kFloat)));
    part.prefetch({1, 1});
    EXPECT_EQ(store->asked.back(), begin + 1);
    part.copy_from(at::zeros({3}), 1);
    EXPECT_EQ(store->open_leases, 0);
    Tensor expected = at::arange(18, at::kFloat);
    expected.narrow(0, begin + 1, 3).zero_();
    EXPECT_TRUE(at::equal(flat, expected)) << begin;
  }
}

TEST(Slice, OfOneBlockIsOneBlock) {
  const auto store = std::make_shared<CopyingStore>(at::arange(18, at::kFloat));
  EXPECT_EQ(slice(Buffer(store, 18, at::kFloat, 18), {5, 7}).block_numel(), 7);
}

}  // namespace
}  // namespace deeptide::tiers
