// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which samples a rank sees: disjoint, complete, in an order that a position restores.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "deeptide/data.h"

namespace deeptide {
namespace {

using Options = DistributedSampler::Options;

std::vector<int64_t> order_of(int64_t num_samples, uint64_t seed, int64_t epoch) {
  const DistributedSampler sampler(num_samples, {.seed = seed});
  std::vector<int64_t> order(num_samples);
  for (int64_t i = 0; i < num_samples; ++i) order[i] = sampler.permute(epoch, i);
  return order;
}

std::vector<std::vector<int64_t>> epoch_of(DistributedSampler& sampler) {
  std::vector<std::vector<int64_t>> batches;
  for (auto batch = sampler.next(); !batch.empty(); batch = sampler.next()) batches.push_back(batch);
  return batches;
}

std::string error_of(int64_t num_samples, const Options& options) {
  try {
    DistributedSampler sampler(num_samples, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

TEST(DistributedSampler, PermutesEachIndexToOnePlace) {
  for (int64_t n : {1, 2, 3, 7, 64, 65, 1000, 12345}) {
    for (int64_t epoch : {0, 1, 1000}) {
      std::vector<int64_t> order = order_of(n, 17, epoch);
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i) << "n " << n << " epoch " << epoch;
    }
  }
}

TEST(DistributedSampler, PermutesWithinTheLargestSizes) {
  const int64_t n = std::numeric_limits<int64_t>::max();
  const DistributedSampler sampler(n, {});
  for (int64_t index : {int64_t{0}, int64_t{1}, n / 2, n - 1}) {
    EXPECT_GE(sampler.permute(3, index), 0);
    EXPECT_LT(sampler.permute(3, index), n);
  }
}

TEST(DistributedSampler, KeepsTheOrderWithoutShuffle) {
  DistributedSampler sampler(10, {.batch_size = 2, .rank = 1, .world_size = 2, .shuffle = false, .drop_last = true});
  const std::vector<std::vector<int64_t>> expected = {{2, 3}, {6, 7}};
  EXPECT_EQ(epoch_of(sampler), expected);
  EXPECT_EQ(epoch_of(sampler), expected);
}

TEST(DistributedSampler, OrdersEachEpochAndSeedAnew) {
  EXPECT_NE(order_of(1000, 1, 0), order_of(1000, 1, 1));
  EXPECT_NE(order_of(1000, 1, 0), order_of(1000, 2, 0));
  EXPECT_NE(order_of(1000, 1, 1), order_of(1000, 2, 0));
  EXPECT_EQ(order_of(1000, 1, 5), order_of(1000, 1, 5));
}

TEST(DistributedSampler, DealsEachSampleOnceWhenBatchesFit) {
  for (bool drop_last : {false, true}) {
    for (int world : {1, 2, 3, 5}) {
      std::vector<int> seen(120, 0);
      for (int rank = 0; rank < world; ++rank) {
        DistributedSampler sampler(120, {.batch_size = 4, .rank = rank, .world_size = world, .drop_last = drop_last});
        for (const auto& batch : epoch_of(sampler)) {
          EXPECT_EQ(batch.size(), 4u);
          for (int64_t index : batch) ++seen.at(index);
        }
      }
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; })) << "world " << world;
    }
  }
}

TEST(DistributedSampler, WrapsToTheEpochsStartOrDropsWhatDoesNotFit) {
  const int world = 3;
  for (bool drop_last : {false, true}) {
    std::map<int64_t, int> seen;
    int64_t batches = 0;
    for (int rank = 0; rank < world; ++rank) {
      DistributedSampler sampler(20, {.batch_size = 2, .rank = rank, .world_size = world, .drop_last = drop_last});
      const auto epoch = epoch_of(sampler);
      EXPECT_EQ(static_cast<int64_t>(epoch.size()), sampler.batches_per_epoch());
      batches += static_cast<int64_t>(epoch.size());
      for (const auto& batch : epoch) {
        for (int64_t index : batch) ++seen[index];
      }
    }
    EXPECT_EQ(batches, drop_last ? 9 : 12);
    EXPECT_EQ(seen.size(), drop_last ? 18u : 20u);
    const std::vector<int64_t> order = order_of(20, 0, 0);
    for (int64_t i = 0; i < 20; ++i) {
      // 24 places for 20 samples: the first four of the order come twice.
      EXPECT_EQ(seen[order[i]], drop_last ? (i < 18) : (i < 4 ? 2 : 1)) << i;
    }
  }
}

TEST(DistributedSampler, GivesFullBatchesWhenThereAreFewerSamplesThanRanks) {
  DistributedSampler sampler(2, {.batch_size = 3, .rank = 1, .world_size = 2, .shuffle = false});
  EXPECT_EQ(sampler.batches_per_epoch(), 1);
  EXPECT_EQ(sampler.next(), (std::vector<int64_t>{1, 0, 1}));
}

TEST(DistributedSampler, EndsAnEpochOnceThenStartsTheNext) {
  DistributedSampler sampler(4, {.batch_size = 2});
  sampler.next();
  sampler.next();
  EXPECT_EQ(sampler.position().epoch, 0);
  EXPECT_EQ(sampler.position().batch, 2);
  EXPECT_TRUE(sampler.next().empty());
  EXPECT_EQ(sampler.position().epoch, 1);
  EXPECT_EQ(sampler.position().batch, 0);
  const std::vector<int64_t> order = order_of(4, 0, 1);
  EXPECT_EQ(sampler.next(), (std::vector<int64_t>{order[0], order[1]}));
}

TEST(DistributedSampler, GoesOnExactlyFromASavedPosition) {
  const Options options = {.batch_size = 3, .rank = 1, .world_size = 2, .seed = 9};
  DistributedSampler straight(50, options);
  std::vector<std::vector<int64_t>> calls;
  std::vector<DistributedSampler::Position> positions;
  for (int i = 0; i < 30; ++i) {
    positions.push_back(straight.position());
    calls.push_back(straight.next());
  }
  for (size_t start = 0; start < calls.size(); ++start) {
    DistributedSampler resumed(50, options);
    resumed.set_position(positions[start]);
    for (size_t i = start; i < calls.size(); ++i) ASSERT_EQ(resumed.next(), calls[i]) << start << " " << i;
  }
}

// Chi-square of where sample 0 lands over many epochs; the seed is fixed, so the outcome is too. The bounds are about
// four standard deviations sqrt(2 * (n - 1)) above the mean n - 1.
TEST(DistributedSampler, SpreadsASampleEvenlyOverThePlaces) {
  for (int64_t n : {2, 3, 7, 16, 100}) {
    const int64_t epochs = 200 * n;
    const DistributedSampler sampler(n, {.seed = 3});
    for (int64_t index : {int64_t{0}, n - 1}) {
      std::vector<double> counts(n, 0.0);
      for (int64_t epoch = 0; epoch < epochs; ++epoch) ++counts[sampler.permute(epoch, index)];
      double chi_square = 0;
      for (double count : counts) chi_square += (count - 200) * (count - 200) / 200;
      EXPECT_LT(chi_square, (n - 1) + 4 * std::max(1.5, std::sqrt(2.0 * (n - 1)))) << "n " << n << " index " << index;
    }
  }
}

// Neighbours in the order must not be neighbours in the data: pairs (order[i], order[i + 1]) fill a grid evenly.
TEST(DistributedSampler, TearsNeighboursApart) {
  const int64_t n = 12345;
  const std::vector<int64_t> order = order_of(n, 5, 0);
  constexpr int kCells = 8;
  double counts[kCells][kCells] = {};
  for (int64_t i = 0; i + 1 < n; ++i) ++counts[order[i] * kCells / n][order[i + 1] * kCells / n];
  const double expected = double(n - 1) / (kCells * kCells);
  double chi_square = 0;
  for (const auto& row : counts) {
    for (double count : row) chi_square += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi_square, 63 + 4 * std::sqrt(2.0 * 63));
}

TEST(DistributedSampler, RefusesImpossibleSizes) {
  EXPECT_NE(error_of(0, {}).find("num_samples is 0, expected at least 1"), std::string::npos);
  EXPECT_NE(error_of(-5, {}).find("num_samples is -5"), std::string::npos);
  EXPECT_NE(error_of(5, {.batch_size = 0}).find("batch_size is 0"), std::string::npos);
  EXPECT_NE(error_of(5, {.world_size = 0}).find("world_size is 0"), std::string::npos);
  EXPECT_NE(error_of(5, {.rank = 2, .world_size = 2}).find("rank is 2, expected 0 to 1"), std::string::npos);
  EXPECT_NE(error_of(5, {.rank = -1}).find("rank is -1"), std::string::npos);
  EXPECT_NE(error_of(5, {.batch_size = std::numeric_limits<int64_t>::max(), .world_size = 2}).find("64 bits"),
            std::string::npos);
  const std::string text = error_of(5, {.batch_size = 3, .world_size = 2, .drop_last = true});
  EXPECT_NE(text.find("num_samples is 5, expected at least batch_size * world_size = 6 with drop_last"),
            std::string::npos)
      << text;
}

TEST(DistributedSampler, RefusesPositionsAndIndicesOutsideTheEpoch) {
  DistributedSampler sampler(10, {.batch_size = 5});
  EXPECT_THROW(sampler.set_position({-1, 0}), ConfigError);
  EXPECT_THROW(sampler.set_position({0, -1}), ConfigError);
  EXPECT_THROW(sampler.set_position({0, 3}), ConfigError);
  sampler.set_position({0, 2});
  EXPECT_TRUE(sampler.next().empty());
  EXPECT_THROW(sampler.permute(0, 10), ConfigError);
  EXPECT_THROW(sampler.permute(0, -1), ConfigError);
  EXPECT_THROW(sampler.permute(-1, 0), ConfigError);
}

// Two ranks save, one goes on with a batch of another size: the next samples of the world are the next of the order.
TEST(Sampler, KeepsItsPositionInClientStateForAnyWorld) {
  DistributedSampler saved(50, {.batch_size = 3, .rank = 1, .world_size = 2, .seed = 7});
  epoch_of(saved);
  for (int i = 0; i < 4; ++i) saved.next();
  const std::string state = saved.add_position(R"({"best": 0.5})");
  EXPECT_EQ(state, R"({"best":0.5,"__deeptide__":{"loader":{"epoch":1,"samples":24,"num_samples":50,"seed":7}}})");
  DistributedSampler again(50, {.batch_size = 4, .seed = 7});
  EXPECT_TRUE(again.take_position(state));
  EXPECT_EQ(again.position().epoch, 1);
  EXPECT_EQ(again.position().batch, 6);
  const std::vector<int64_t> order = order_of(50, 7, 1);
  EXPECT_EQ(again.next(), std::vector<int64_t>(order.begin() + 24, order.begin() + 28));
}

TEST(Sampler, RefusesAPositionOfOtherData) {
  DistributedSampler sampler(50, {.seed = 7});
  sampler.next();
  EXPECT_FALSE(sampler.take_position("{}"));
  EXPECT_FALSE(sampler.take_position(R"({"__deeptide__": {}})"));
  const std::string state = sampler.add_position();
  DistributedSampler other(51, {.seed = 7}), reseeded(50, {.seed = 8});
  for (DistributedSampler* wrong : {&other, &reseeded}) {
    try {
      wrong->take_position(state);
      ADD_FAILURE() << "no ConfigError was thrown";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("the checkpoint's position is for "), std::string::npos) << error.what();
    }
    EXPECT_EQ(wrong->position().batch, 0);
  }
  EXPECT_THROW(sampler.add_position("[]"), ConfigError);
  EXPECT_THROW(sampler.take_position("{"), ConfigError);
  EXPECT_THROW(sampler.take_position(R"({"__deeptide__": {"loader": {"num_samples": 50, "seed": 7}}})"), ConfigError);
}

}  // namespace
}  // namespace deeptide
