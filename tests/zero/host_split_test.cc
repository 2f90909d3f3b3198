// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts units between a device and its host.
#include "zero/host_split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace deeptide::zero {
namespace {

TEST(HostSplit, CutsUnitsAtBlocksAndKeepsTheShareToHalfABlock) {
  const std::vector<std::vector<int64_t>> models = {{1'211'100, 26'424, 26'424},         {7, 100, 3, 64},
                                                    std::vector<int64_t>(1000, 100),     {kSplitNumel},
                                                    {10 * kSplitNumel, kSplitNumel - 1}, {0, 5}};
  for (const std::vector<int64_t>& units : models) {
    for (const double share : {0.001, 0.3, 0.5, 0.75, 0.999}) {
      const std::vector<int64_t> split = split_for_host(units, share);
      ASSERT_EQ(split.size(), units.size());
      int64_t all = 0, on_host = 0;
      for (size_t i = 0; i < units.size(); ++i) {
        const int64_t numel = units[i], on_device = split[i];
        EXPECT_GE(on_device, 0);
        EXPECT_LE(on_device, numel);
        EXPECT_TRUE(on_device == numel || on_device % kSplitNumel == 0) << on_device;
        all += numel;
        on_host += numel - on_device;
        EXPECT_LE(std::abs(static_cast<double>(on_host) - share * static_cast<double>(all)), kSplitNumel / 2 + 1)
            << share << " of " << all;
      }
    }
  }
}

TEST(HostSplit, LeavesAllOnOneSideAtTheEnds) {
  const std::vector<int64_t> units{5, 3 * kSplitNumel + 7, kSplitNumel, 1};
  EXPECT_EQ(split_for_host(units, 0.0), units);
  EXPECT_EQ(split_for_host(units, 1.0), std::vector<int64_t>(4, 0));
}

}  // namespace
}  // namespace deeptide::zero
