// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whole parameters for a while, one rank's writes, and micro-batches without reductions.
#include "deeptide/gathered_parameters.h"

#include <gtest/gtest.h>

#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide {
namespace {

using at::Tensor;

void step(Engine& engine, TinyModel& model, int number, const World& world) {
  const auto [tokens, targets] = batch_of(number, 2 * world.size);
  engine.backward(model(tokens.narrow(0, 2 * world.rank, 2), targets.narrow(0, 2 * world.rank, 2)));
  EXPECT_TRUE(engine.step().applied());
}

class Gathered : public testing::TestWithParam<std::tuple<int, Ranks>> {};

TEST_P(Gathered, TakesOneRanksValues) {
  const auto [stage, ranks] = GetParam();
  run_ranks(2, [&, stage = stage, ranks = ranks](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(stage, 2, 1, false, ranks));
    step(engine, model, 0, world);
    const Tensor weight = model->embed->weight, scale = model->norm->weight;
    const Tensor before = engine.full_state("norm.weight", "master");
    {
      const at::NoGradGuard no_grad;
      const GatheredParameters whole(engine, {weight, scale}, 1);
      EXPECT_EQ(weight.numel(), kVocabulary * kWidth);
      weight.fill_(0.25 + world.rank);
    }
    EXPECT_TRUE(engine.full_state("embed.weight", "master").eq(1.25).all().item<bool>());
    EXPECT_TRUE(at::equal(engine.full_state("norm.weight", "master"), before));
    step(engine, model, 1, world);
    EXPECT_FALSE(engine.full_state("embed.weight", "master").eq(1.25).all().item<bool>());
  });
}

TEST_P(Gathered, DropsWhatAnExceptionLeaves) {
  const auto [stage, ranks] = GetParam();
  run_ranks(2, [&, stage = stage, ranks = ranks](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(stage, 2, 1, false, ranks));
    const Tensor before = engine.full_state("norm.weight", "master");
    EXPECT_THROW(
        {
          const at::NoGradGuard no_grad;
          const GatheredParameters whole(engine, {model->norm->weight}, 0);
          model->norm->weight.fill_(7.0);
          throw std::runtime_error("the program's");
        },
        std::runtime_error);
    EXPECT_TRUE(at::equal(engine.full_state("norm.weight", "master"), before));
    step(engine, model, 0, world);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Gathered,
                         testing::Combine(testing::Values(0, 2, 3), testing::Values(Ranks::together, Ranks::apart)));

TEST(NoSync, LeavesTheStepToTheMicroBatchAfterIt) {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(1));
    const auto [tokens, targets] = batch_of(0, 4);
    const auto part = [&] { return model(tokens.narrow(0, 2 * world.rank, 2), targets.narrow(0, 2 * world.rank, 2)); };
    {
      const NoSync quiet(engine);
      engine.backward(part());
      EXPECT_EQ(engine.step().result, StepResult::accumulating);
    }
    engine.backward(part());
    EXPECT_TRUE(engine.step().applied());
    EXPECT_EQ(engine.global_steps(), 1);
  });
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(2));
    EXPECT_THROW(NoSync{engine}, c10::ValueError);
    EXPECT_THROW(GatheredParameters(engine, {model->embed->weight}, 1), c10::ValueError);
  });
}

}  // namespace
}  // namespace deeptide
