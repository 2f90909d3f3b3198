// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts buffers between two places.
#include "tiers/split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace deeptide::tiers {
namespace {

constexpr int64_t kBlock = int64_t{1} << 16;

TEST(Split, CutsBuffersAtBlocksAndKeepsTheShareToHalfABlock) {
  const std::vector<std::vector<int64_t>> models = {{1'211'100, 26'424, 26'424},     {7, 100, 3, 64},
                                                    std::vector<int64_t>(1000, 100), {kBlock},
                                                    {10 * kBlock, kBlock - 1},       {0, 5}};
  for (const std::vector<int64_t>& units : models) {
    for (const double share : {0.001, 0.3, 0.5, 0.75, 0.999}) {
      const std::vector<int64_t> staying = split(units, share, kBlock);
      ASSERT_EQ(staying.size(), units.size());
      int64_t all = 0, left = 0;
      for (size_t i = 0; i < units.size(); ++i) {
        const int64_t numel = units[i], stays = staying[i];
        EXPECT_GE(stays, 0);
        EXPECT_LE(stays, numel);
        EXPECT_TRUE(stays == numel || stays % kBlock == 0) << stays;
        all += numel;
        left += numel - stays;
        EXPECT_LE(std::abs(static_cast<double>(left) - share * static_cast<double>(all)), kBlock / 2 + 1)
            << share << " of " << all;
      }
    }
  }
}

TEST(Split, LeavesAllOnOneSideAtTheEnds) {
  const std::vector<int64_t> units{5, 3 * kBlock + 7, kBlock, 1};
  EXPECT_EQ(split(units, 0.0, kBlock), units);
  EXPECT_EQ(split(units, 1.0, kBlock), std::vector<int64_t>(4, 0));
}

}  // namespace
}  // namespace deeptide::tiers
