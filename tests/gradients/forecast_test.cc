// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares the reducer's forecasts from layouts alone.
#include "gradients/forecast.h"

#include <gtest/gtest.h>

namespace deeptide::gradients {
namespace {

constexpr int64_t kSmall = 1 << 18;  // elements: 1 MiB

struct Sizes {
  explicit Sizes(const std::vector<int64_t>& numels) {
    for (const int64_t numel : numels) {
      sharding::UnitLayout& unit = units.emplace_back();
      unit.shard = numel / 2;
      unit.numel = numel;
      unit.slots.push_back({static_cast<int>(units.size()) - 1, 0, numel});
    }
    for (const auto& unit : units) all.push_back(&unit);
  }
  std::vector<sharding::UnitLayout> units;
  std::vector<const sharding::UnitLayout*> all;
};

int64_t communication_of(const Sizes& sizes, const ReducerOptions& options, bool shares_memory, int num_ranks = 2) {
  return forecast(sizes.all, options, num_ranks, shares_memory).communication / (4 * kSmall);
}

int64_t communication_of(const std::vector<int64_t>& numels, const ReducerOptions& options, bool shares_memory) {
  return communication_of(Sizes(numels), options, shares_memory);
}

/// Ranks that share memory may drift apart by six small buckets, and by as few as keep both busy where they are large.
TEST(Forecast, CountsFewerBucketsTheLargerTheyAre) {
  EXPECT_EQ(communication_of(std::vector<int64_t>(12, kSmall), {}, true), 6);
  std::vector<int64_t> mixed(12, kSmall);
  mixed.back() = 8 * kSmall;
  EXPECT_EQ(communication_of(mixed, {}, true), 8 + 5);
  EXPECT_EQ(communication_of(std::vector<int64_t>(12, 4 * kSmall), {}, true), 4 * 4);
  EXPECT_EQ(communication_of(std::vector<int64_t>(12, 100 * kSmall), {}, true), 3 * 100);
  EXPECT_EQ(communication_of({kSmall, kSmall}, {}, true), 2) << "no more than there are units";
}

TEST(Forecast, CountsWhatArrivesBesideWhatIsSent) {
  const std::vector<int64_t> units(12, kSmall);
  EXPECT_EQ(communication_of(units, {}, false), 3 + 2) << "one fills, two are under way";
  EXPECT_EQ(communication_of(units, {.ordered = false}, false), 3 + 1) << "a shard of two ranks is half a unit";
  EXPECT_EQ(communication_of(units, {.accumulates_whole = true}, false), 12 + 2);
  EXPECT_EQ(communication_of(units, {.reduce_dtype = at::kBFloat16, .accumulates_whole = true}, false) * 2, 24 + 2)
      << "sums of fp32 become narrow one by one";
}

/// A unit of another type lies after the four and has a parameter before them: all wait for it.
TEST(Forecast, CountsBucketsThatWaitForALaterUnit) {
  Sizes sizes(std::vector<int64_t>(8, kSmall));
  sizes.units.back().slots.push_back({-1, 0, 0});
  const ReducerOptions options;
  EXPECT_EQ(communication_of(sizes, options, false), 8 + 2);
  EXPECT_EQ(communication_of(sizes, options, true), 8);
  EXPECT_EQ(communication_of(sizes, options, false, /*num_ranks=*/1), 8);
  EXPECT_EQ(communication_of(sizes, {.reserve = false}, false), 8 + 2);
}

TEST(Forecast, CountsMessagesOfWhatIsMostlyZero) {
  ReducerOptions options;
  options.mostly_zero = {true, false, false, false, false};
  EXPECT_EQ(communication_of({8 * kSmall, kSmall, kSmall, kSmall, kSmall}, options, false), 8 + (8 + 8 + 1) + (8 + 1));
}

/// On a device the order of calls says which buffers are in use.
TEST(Forecast, PlaysABackwardPassWhereNothingIsReserved) {
  const ReducerOptions options{.reserve = false};
  const Sizes sizes(std::vector<int64_t>(12, kSmall));
  EXPECT_EQ(communication_of(sizes, options, false), 3 + 2);
  EXPECT_EQ(communication_of(sizes, options, false, /*num_ranks=*/1), 3);
  EXPECT_EQ(communication_of({kSmall, 8 * kSmall}, options, false), 2 * 9);
  ReducerOptions whole = options;
  whole.accumulates_whole = true;
  EXPECT_EQ(communication_of(sizes, whole, false), 12 + 2);
  whole.reduce_dtype = at::kBFloat16;
  EXPECT_EQ(communication_of(std::vector<int64_t>(12, 2 * kSmall), whole, false), 24 + 1 + 2)
      << "the sum that became narrow is the next one's bucket";
}

}  // namespace
}  // namespace deeptide::gradients
