// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// C++ modules that are built under zero::Init train as those that are built in memory.
#include <gtest/gtest.h>

#include "deeptide/zero.h"
#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

/// The state after two steps of a model built in memory, or under zero::Init.
std::vector<NamedTensor> trained(const World& world, const Config& config, bool deferred) {
  TinyModel model = make_seeded([&] {
    std::unique_ptr<zero::Init> scope;
    if (deferred) scope = std::make_unique<zero::Init>(/*min_bytes=*/256);
    return TinyModel();
  });
  EXPECT_EQ(zero::is_deferred(model->embed->weight), deferred);
  Engine engine = engine_of(*model, world, config);
  EXPECT_FALSE(zero::is_deferred(model->embed->weight));
  for (int step = 0; step < 2; ++step) {
    const auto [tokens, targets] = batch_of(step, 2);
    engine.backward(model(tokens, targets));
    EXPECT_TRUE(engine.step().applied());
  }
  return engine.module_state_dict();
}

class ZeroInit : public testing::TestWithParam<std::tuple<int, Ranks, bool>> {};

TEST_P(ZeroInit, TrainsToTheSameBits) {
  const auto [stage, ranks, bf16] = GetParam();
  const Config config = config_of(stage, 2, 1, bf16, ranks);
  run_ranks(2, [&](const World& world) {
    const auto plain = trained(world, config, false), deferred = trained(world, config, true);
    ASSERT_EQ(plain.size(), deferred.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::equal(plain[i].tensor, deferred[i].tensor)) << plain[i].name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ZeroInit,
                         testing::Combine(testing::Values(0, 2, 3), testing::Values(Ranks::together, Ranks::apart),
                                          testing::Bool()));

}  // namespace
}  // namespace deeptide
