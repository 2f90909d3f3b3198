// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A C++ model whose parameters change after initialize: rebuilt in place, bit for bit where nothing changed.
#include <gtest/gtest.h>

#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

using at::Tensor;

constexpr int64_t kMicro = 2;

void train(TinyModel& model, Engine& engine, const World& world, int first, int last) {
  for (int step = first; step < last; ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * world.size);
    engine.backward(
        model(tokens.narrow(0, world.rank * kMicro, kMicro), targets.narrow(0, world.rank * kMicro, kMicro)));
    ASSERT_TRUE(engine.step().applied());
  }
}

struct RebuildCase {
  int stage;
  bool bf16;
  Ranks ranks;
};

class Rebuild : public testing::TestWithParam<RebuildCase> {};

TEST_P(Rebuild, ChangesNoBitOfAModelThatDidNotChange) {
  const auto [stage, bf16, how] = GetParam();
  run_ranks(2, [&](const World& world) {
    std::vector<std::vector<NamedTensor>> states;
    for (const bool rebuilds : {false, true}) {
      TinyModel model = make_tiny();
      Engine engine = engine_of(*model, world, config_of(stage, kMicro, 1, bf16, how));
      train(model, engine, world, 0, 3);
      if (rebuilds) engine.rebuild(describe(*model));
      EXPECT_EQ(engine.global_steps(), 3);
      train(model, engine, world, 3, 6);
      states.push_back(engine.module_state_dict());
    }
    for (size_t i = 0; i < states[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(states[0][i].tensor, states[1][i].tensor)) << states[0][i].name;
    }
  });
}

TEST_P(Rebuild, TrainsWhatWasFrozenAndBeginsItAnew) {
  const auto [stage, bf16, how] = GetParam();
  run_ranks(2, [&](const World& world) {
    TinyModel model = make_tiny();
    Tensor frozen = model->norm->weight;
    frozen.set_requires_grad(false);
    Engine engine = engine_of(*model, world, config_of(stage, kMicro, 1, bf16, how));
    train(model, engine, world, 0, 2);
    const Tensor before = frozen.detach().clone();
    frozen.set_requires_grad(true);
    engine.rebuild(describe(*model));
    EXPECT_FALSE(engine.ended());
    train(model, engine, world, 2, 4);
    EXPECT_FALSE(torch::equal(frozen.detach().clone(), before));
    // Two steps with beta1 of its own, beside four of its unit's other parameters.
    EXPECT_GT(engine.full_state("norm.weight", "exp_avg").abs().sum().item<double>(), 0.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Engine, Rebuild,
                         testing::Values(RebuildCase{0, false, Ranks::apart}, RebuildCase{2, true, Ranks::apart},
                                         RebuildCase{3, false, Ranks::apart}, RebuildCase{3, true, Ranks::apart},
                                         RebuildCase{2, true, Ranks::together}));

}  // namespace
}  // namespace deeptide
