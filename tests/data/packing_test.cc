// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rows hold every sequence once and no more than they have room for, and no token attends to another sequence.
#include "deeptide/packing.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace deeptide {
namespace {

using Rows = std::vector<std::vector<int64_t>>;

Rows packed(const std::vector<int64_t>& lengths, int64_t row_length) { return pack_lengths(lengths, row_length); }

TEST(Packing, PutsTheLongestFirstIntoTheFullestRowWithRoom) {
  EXPECT_EQ(packed({}, 4), Rows());
  EXPECT_EQ(packed({4, 4}, 4), (Rows{{0}, {1}}));
  EXPECT_EQ(packed({3, 5, 2, 6, 1}, 8), (Rows{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(packed({1, 1, 1, 1, 1}, 2), (Rows{{0, 1}, {2, 3}, {4}}));
}

TEST(Packing, HoldsEverySequenceOnceWithinItsRow) {
  std::mt19937 random(3);
  for (const int64_t row_length : {1, 7, 64}) {
    std::vector<int64_t> lengths(200);
    for (int64_t& length : lengths) length = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(row_length));
    std::vector<int> seen(lengths.size(), 0);
    const Rows rows = packed(lengths, row_length);
    int64_t tokens = 0;
    for (const auto& row : rows) {
      int64_t used = 0;
      for (const int64_t sequence : row) used += lengths[static_cast<size_t>(sequence)];
      for (const int64_t sequence : row) ++seen[static_cast<size_t>(sequence)];
      EXPECT_LE(used, row_length);
      tokens += used;
    }
    EXPECT_EQ(seen, std::vector<int>(lengths.size(), 1));
    EXPECT_LT(static_cast<int64_t>(rows.size() - 1) * row_length, 2 * tokens) << "at most one row is half empty";
  }
}

TEST(Packing, RefusesLengthsThatNoRowHolds) {
  EXPECT_THROW(packed({2, 9}, 8), ConfigError);
  EXPECT_THROW(packed({0}, 8), ConfigError);
}

TEST(Packing, LetsTokensAttendToTheirOwnSequence) {
  const at::Tensor ids = at::tensor({0, 0, 1, -1}, at::kLong).unsqueeze(0);
  const at::Tensor mask = block_diagonal_mask(ids), causal = block_diagonal_mask(ids, /*causal=*/true);
  EXPECT_EQ(mask.sizes().vec(), (std::vector<int64_t>{1, 1, 4, 4}));
  for (int64_t query = 0; query < 4; ++query) {
    for (int64_t key = 0; key < 4; ++key) {
      const bool same = query == key || query + key == 1;
      EXPECT_EQ(mask[0][0][query][key].item<bool>(), same) << query << ", " << key;
      EXPECT_EQ(causal[0][0][query][key].item<bool>(), same && key <= query) << query << ", " << key;
    }
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor added = block_diagonal_mask(ids, false, dtype);
    EXPECT_EQ(added.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(added.eq(0), mask));
    EXPECT_TRUE(added.isfinite().all().item<bool>());
    EXPECT_LT(added.min().item<double>(), -65000);
  }
}

}  // namespace
}  // namespace deeptide
