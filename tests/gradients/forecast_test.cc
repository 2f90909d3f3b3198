// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What the reducer forecasts from layouts alone.
#include "gradients/forecast.h"

#include <gtest/gtest.h>

namespace deeptide::gradients {
namespace {

/// Where ranks share memory, six buckets are in use at once; a pool keeps those of one size for the next of that size.
TEST(Forecast, CountsTheBucketsThatAreInUseAtOnceAtTheirOwnSizes) {
  constexpr int64_t kSmall = 1 << 18;  // elements: 1 MiB
  const auto bytes_of = [](const std::vector<int64_t>& sizes) {
    std::vector<sharding::UnitLayout> units;
    for (const int64_t size : sizes) {
      sharding::UnitLayout& unit = units.emplace_back();
      unit.shard = size / 2;
      unit.numel = size;
    }
    std::vector<const sharding::UnitLayout*> all;
    for (const auto& unit : units) all.push_back(&unit);
    return forecast(all, {}, /*num_ranks=*/2, /*shares_memory=*/true).communication / (4 * kSmall);
  };
  EXPECT_EQ(bytes_of(std::vector<int64_t>(12, kSmall)), 6);
  std::vector<int64_t> mixed(12, kSmall);
  mixed.back() = 8 * kSmall;
  EXPECT_EQ(bytes_of(mixed), 8 + 5);
  EXPECT_EQ(bytes_of({kSmall, kSmall}), 4) << "two rounds of two";
}

}  // namespace
}  // namespace deeptide::gradients
