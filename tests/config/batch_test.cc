// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Batch arithmetic: any one or two of three sizes, over worlds 1-4.
#include "config/batch.h"

#include <gtest/gtest.h>

#include "deeptide/errors.h"

namespace deeptide::config {
namespace {

using Size = std::optional<int64_t>;

BatchConfig with(Size train, Size micro, Size accumulation) { return {train, micro, accumulation, {}}; }

std::string problem_of(const BatchConfig& batch, int64_t world) {
  try {
    batch_sizes(batch, world, "ds_config.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

void expect_sizes(const BatchConfig& batch, int64_t world, int64_t train, int64_t micro, int64_t accumulation) {
  const BatchSizes sizes = batch_sizes(batch, world, "ds_config.json");
  EXPECT_EQ(sizes.train, train);
  EXPECT_EQ(sizes.micro, micro);
  EXPECT_EQ(sizes.accumulation, accumulation);
}

TEST(BatchSizes, FollowFromAnyTwoOfThem) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (int64_t micro : {1, 2, 5}) {
      for (int64_t accumulation : {1, 3, 4}) {
        const int64_t train = world * micro * accumulation;
        expect_sizes(with(train, micro, accumulation), world, train, micro, accumulation);
        expect_sizes(with(train, micro, {}), world, train, micro, accumulation);
        expect_sizes(with(train, {}, accumulation), world, train, micro, accumulation);
        expect_sizes(with({}, micro, accumulation), world, train, micro, accumulation);
        expect_sizes(with(train, {}, {}), world, train, micro * accumulation, 1);
        expect_sizes(with({}, micro, {}), world, micro * world, micro, 1);
      }
    }
  }
}

TEST(BatchSizes, AgreeWithDeepSpeedsOwnExamples) {
  EXPECT_EQ(problem_of(with(32, 16, 1), 2), "");
  EXPECT_EQ(problem_of(with(32, 8, 2), 2), "");
  for (const BatchConfig& batch :
       {with(33, 17, 2), with(33, 17, {}), with(33, {}, 2), with(32, 18, 1), with(32, 18, {})}) {
    EXPECT_NE(problem_of(batch, 2), "");
  }
  EXPECT_EQ(
      problem_of(with(32, 18, 1), 2),
      "ds_config.json: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
      "gradient_acc_step * world_size 32 != 18 * 1 * 2; set train_batch_size to 36 (2 ranks x micro-batches of 18 x "
      "1 accumulation steps) or leave one of the three out");
}

TEST(BatchSizes, AreRefusedForEveryTrainBatchThatDoesNotDivide) {
  for (int64_t world : {1, 2, 3, 4}) {
    for (int64_t train = 1; train <= 24; ++train) {
      EXPECT_EQ(problem_of(with(train, {}, {}), world).empty(), train % world == 0) << train << " " << world;
      EXPECT_EQ(problem_of(with(train, 2, {}), world).empty(), train % (2 * world) == 0) << train << " " << world;
      EXPECT_EQ(problem_of(with(train, {}, 3), world).empty(), train % (3 * world) == 0) << train << " " << world;
      EXPECT_EQ(problem_of(with(train, 2, 3), world).empty(), train == 6 * world) << train << " " << world;
    }
  }
}

TEST(BatchSizes, NeedOneOfTwoToBeGiven) {
  for (const BatchConfig& batch : {with({}, {}, {}), with({}, {}, 4)}) {
    EXPECT_NE(
        problem_of(batch, 1).find("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"),
        std::string::npos);
  }
}

TEST(BatchSizes, HaveToBePositive) {
  EXPECT_NE(problem_of(with(0, {}, {}), 1).find("Train batch size: 0 has to be greater than 0"), std::string::npos);
  EXPECT_NE(problem_of(with({}, -1, {}), 1).find("Micro batch size per gpu: -1 has to be greater"), std::string::npos);
  EXPECT_NE(problem_of(with({}, 1, 0), 1).find("Gradient accumulation steps: 0 has to be greater"), std::string::npos);
  EXPECT_NE(problem_of(with(2, {}, {}), 4).find("Micro batch size per gpu: 0 has to be greater"), std::string::npos);
  EXPECT_NE(problem_of(with(2, {}, {}), 4).find("a multiple of 4 (4 ranks)"), std::string::npos);
  EXPECT_NE(problem_of(with(1, 1, 1), 0).find("world size is 0"), std::string::npos);
}

TEST(BatchSizes, OfAConfigurationAreThoseOfItsText) {
  const BatchSizes sizes =
      Config::from_text(R"({"train_batch_size": 24, "gradient_accumulation_steps": 3})").batch_sizes(4);
  EXPECT_EQ(sizes.train, 24);
  EXPECT_EQ(sizes.micro, 2);
  EXPECT_EQ(sizes.accumulation, 3);
}

TEST(BatchSizes, AreOfAsManyRanksAsAConfigurationNames) {
  for (const char* more :
       {R"("train_micro_batch_size_per_gpu": 3)",
        R"("elasticity": {"enabled": true, "max_train_batch_size": 12, "micro_batch_sizes": [3]})"}) {
    const Config config = Config::from_text(std::string(R"({"data_parallel_size": 2, )") + more + "}", "ds.json");
    EXPECT_EQ(config.batch_sizes(2).micro, 3);
    try {
      config.batch_sizes(4);
      ADD_FAILURE() << more;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).find("ds.json: data_parallel_size: got 2, and ranks that take different "),
                0u)
          << error.what();
    }
  }
}

TEST(BatchSizes, DoNotOverflow) {
  EXPECT_NE(problem_of(with({}, INT64_MAX, 2), 2).find("beyond 64 bits"), std::string::npos);
  EXPECT_NE(problem_of(with(8, INT64_MAX, 2), 2).find("beyond 64 bits"), std::string::npos);
}

}  // namespace
}  // namespace deeptide::config
