// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Elastic batches: DeepSpeed's known values, properties, and every error.
#include "config/elasticity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

namespace deeptide::config {
namespace {

ElasticityConfig old_version() {
  ElasticityConfig config = Config().elasticity();
  config.enabled = true;
  config.sizes_given = true;
  config.version = 0.1;
  return config;
}

Config parsed(const std::string& elasticity, const std::string& more = "") {
  return Config::from_text("{\"elasticity\": {\"enabled\": true, " + elasticity + "}" + more + "}");
}

const std::string kGiven = "\"max_train_batch_size\": 2000, \"micro_batch_sizes\": [2, 4, 6], \"version\": 0.1";

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// DeepSpeed's own unit tests: 10,000, micro-batches of 8 to 17, 32 to 1500 ranks.
TEST(Elasticity, GivesDeepSpeedsKnownBatch) {
  ElasticityConfig config = old_version();
  config.max_train_batch_size = 10'000;
  config.micro_batch_sizes = {8, 12, 16, 17};
  config.min_gpus = 32;
  config.max_gpus = 1500;
  const ElasticBatch batch = elastic_batch(config, 0);
  EXPECT_EQ(batch.train, 9792);
  EXPECT_EQ(batch.valid_worlds.size(), 23u);
  EXPECT_EQ(elastic_batch(config, 64).micro, 17);
  EXPECT_THROW(elastic_batch(config, 128), IncompatibleWorldSize);
}

TEST(Elasticity, DividesTheBatchByEveryValidWorld) {
  for (const bool larger : {true, false}) {
    for (const double version : {0.1, 0.2}) {
      ElasticityConfig config = old_version();
      config.version = version;
      config.prefer_larger_batch = larger;
      const ElasticBatch batch = elastic_batch(config, 4);
      EXPECT_LE(batch.train, config.max_train_batch_size);
      EXPECT_TRUE(std::is_sorted(batch.valid_worlds.begin(), batch.valid_worlds.end()));
      for (const int64_t world : batch.valid_worlds) {
        const ElasticBatch again = elastic_batch(config, world);
        EXPECT_EQ(again.train, batch.train);
        EXPECT_EQ(again.train % (again.micro * world), 0) << world;
      }
    }
  }
}

TEST(Elasticity, CountsWholeNodesInVersionTwo) {
  ElasticityConfig config = old_version();
  config.version = 0.2;
  config.num_gpus_per_node = 8;
  for (const int64_t world : elastic_batch_unchecked(config, 16).valid_worlds) EXPECT_EQ(world % 8, 0);
  EXPECT_TRUE(has(error_of([&] { elastic_batch(config, 0); }), "elasticity.version: 0.2 needs the number of ranks"));
}

TEST(Elasticity, TakesAWorldOfPartialNodesAlone) {
  ElasticityConfig config = old_version();
  config.version = 0.2;
  config.num_gpus_per_node = 7;  // 61 / 7 * 7 is below 61 in floating point
  const ElasticBatch batch = elastic_batch(config, 61);
  EXPECT_EQ(batch.valid_worlds, std::vector<int64_t>{61});
  EXPECT_EQ(batch.train % 61, 0);
}

TEST(Elasticity, NamesWhatIsWrong) {
  const auto broken = [](auto change) {
    ElasticityConfig config = old_version();
    change(config);
    return error_of([&] { elastic_batch(config, 4); });
  };
  EXPECT_TRUE(has(broken([](auto& c) { c.version = 0.3; }), "elasticity.version: got 0.3, expected 0.1 or 0.2"));
  EXPECT_TRUE(has(broken([](auto& c) { c.model_parallel_size = 2; }), "set version to 0.2"));
  EXPECT_TRUE(has(broken([](auto& c) { c.min_gpus = 9, c.max_gpus = 8; }), "min_gpus: 9 is greater than max_gpus 8"));
  EXPECT_TRUE(has(broken([](auto& c) { c.micro_batch_sizes = {4000}; }), "micro_batch_sizes: 4000 is greater"));
  EXPECT_TRUE(has(broken([](auto& c) { c.micro_batch_sizes = {}; }), "got none"));
  EXPECT_TRUE(has(broken([](auto& c) { c.min_gpus = 5001; }), "suits any number of ranks from 5001 to 10000"));
  EXPECT_TRUE(has(broken([](auto& c) { c.version = 0.2, c.model_parallel_size = 2, c.num_gpus_per_node = 3; }),
                  "num_gpus_per_node: 3 is not divisible by model_parallel_size 2"));
  EXPECT_TRUE(has(broken([](auto& c) { c.max_gpus = 2; }), "World size (4) is not valid"));
}

TEST(Elasticity, SetsTheBatchSizesOfAConfiguration) {
  const BatchSizes sizes = parsed(kGiven).batch_sizes(4);
  EXPECT_EQ(sizes.train, elastic_batch(old_version(), 4).train);
  EXPECT_EQ(sizes.train, sizes.micro * sizes.accumulation * 4);
  const std::string error = error_of([] { parsed(kGiven).batch_sizes(7919); });
  EXPECT_TRUE(has(error, "World size (7919) is not valid")) << error;
}

TEST(Elasticity, NeedsItsTwoKeysAndRefusesBatchKeysBesideIt) {
  for (const char* one : {"\"max_train_batch_size\": 2000", "\"micro_batch_sizes\": [2]"}) {
    const std::string missing = error_of([&] { parsed(one).batch_sizes(4); });
    EXPECT_TRUE(has(missing, "elasticity.max_train_batch_size, micro_batch_sizes: missing")) << missing;
  }
  const std::string beside = error_of([] { parsed(kGiven, ", \"train_batch_size\": 8"); });
  EXPECT_TRUE(has(beside, "train_batch_size: has no effect because elastic training is enabled")) << beside;
  const Config passed = parsed(kGiven + ", \"ignore_non_elastic_batch_info\": true", ", \"train_batch_size\": 8");
  EXPECT_EQ(passed.batch_sizes(4).train, elastic_batch(old_version(), 4).train);
}

TEST(Elasticity, HoldsTheSchedulerToItsWord) {
  ElasticityConfig config = old_version();
  const char* same = R"({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1})";
  EXPECT_EQ(error_of([&] { check_scheduler_contract(config, same); }), "none");
  EXPECT_EQ(error_of([&] { check_scheduler_contract(config, nullptr); }), "none");
  config.max_train_batch_size = 1000;
  EXPECT_TRUE(has(error_of([&] { check_scheduler_contract(config, same); }),
                  "max_train_batch_size: 1000 does not match 2000 in DEEPSPEED_ELASTICITY_CONFIG"));
  config = old_version();
  config.version = 0.2;
  EXPECT_TRUE(has(error_of([&] { check_scheduler_contract(config, same); }), "version: 0.2 does not match 0.1"));
  ::setenv("DEEPSPEED_ELASTICITY_CONFIG", R"({"max_train_batch_size": 8, "micro_batch_sizes": [2]})", 1);
  EXPECT_TRUE(has(error_of([] { parsed(kGiven); }), "does not match 8"));
  ::unsetenv("DEEPSPEED_ELASTICITY_CONFIG");
}

}  // namespace
}  // namespace deeptide::config
