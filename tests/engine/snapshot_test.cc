// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies of models: whole, of their own, as they were when they were taken.
#include "deeptide/snapshot.h"

#include <gtest/gtest.h>

#include "deeptide/zero.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide {
namespace {

using at::Tensor;

class Snapshot : public testing::TestWithParam<std::tuple<int, Ranks>> {};

TEST_P(Snapshot, KeepsTheModelAsItWasWhileTrainingGoesOn) {
  const auto [stage, ranks] = GetParam();
  run_ranks(2, [&, stage = stage, ranks = ranks](const World& world) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                                torch::nn::Linear(7, 3));
    Engine engine = engine_of(*model, world, config_of(stage, 2, 1, false, ranks));
    const Tensor input = torch::arange(10, torch::kFloat).view({2, 5}) / 10;
    const auto step = [&] {
      engine.backward(model->forward(input).square().mean());
      EXPECT_TRUE(engine.step().applied());
    };
    step();
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(snapshot(*model));
    ASSERT_NE(copy, nullptr);
    const Tensor then = model->forward(input).detach();
    step();
    EXPECT_TRUE(torch::equal(copy->forward(input), then));
    EXPECT_FALSE(torch::equal(model->forward(input).detach(), then));
    EXPECT_FALSE(copy->is_training());
    EXPECT_TRUE(model->is_training());
    for (const Tensor& parameter : copy->parameters()) {
      EXPECT_FALSE(parameter.requires_grad());
      EXPECT_FALSE(zero::is_sharded(parameter));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Snapshot,
                         testing::Combine(testing::Values(0, 2, 3), testing::Values(Ranks::together, Ranks::apart)));

TEST(Snapshots, NameAClassThatCannotBeCopied) {
  const TinyModel model = make_tiny();
  const std::string text = error_of([&] { snapshot(*model); });
  EXPECT_NE(text.find("snapshot: clone() has not been implemented for "), std::string::npos) << text;
  EXPECT_NE(text.find("Subclass torch::nn::Cloneable<"), std::string::npos) << text;
}

}  // namespace
}  // namespace deeptide
