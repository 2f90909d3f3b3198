// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How a C++ program's parameters come to their optimizer: groups by the configuration, and numbers that do not suit.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "deeptide/engine.h"
#include "deeptide/errors.h"
#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

using Names = std::set<std::string>;

Names names_of(const Engine& engine, int64_t group) {
  const auto names = engine.group_parameters(group);
  return {names.begin(), names.end()};
}

Config muon_config(const std::string& params) {
  const Config without = config_of(1).with(R"({"optimizer": null})");
  return without.with(R"({"optimizer": {"type": "Muon", "params": {)" + params + "}}}");
}

TEST(Muon, StepsTheMatricesOfTheConfigurationsGroupAndLeavesTheRestToAdamW) {
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, muon_config(R"("muon_lr": 0.05, "adam_lr": 0.01)"));
    ASSERT_EQ(engine.num_groups(), 2);
    Names matrices, rest;
    for (const auto& item : model->named_parameters()) {
      if (item.key() == "head.weight") continue;  // tied to the embedding, which is none
      const bool matrix = item.value().dim() == 2 && item.key() != "embed.weight";
      (matrix ? matrices : rest).insert(item.key());
    }
    EXPECT_EQ(names_of(engine, 0), matrices);
    EXPECT_EQ(names_of(engine, 1), rest);
    EXPECT_EQ(engine.hyperparameters(0).lr(), 0.05);
    EXPECT_EQ(engine.hyperparameters(1).lr(), 0.01);
    double first = 0.0, last = 0.0;
    const auto [tokens, targets] = batch_of(0, 2);
    for (int step = 0; step < 20; ++step) {
      const at::Tensor loss = model(tokens, targets);
      last = loss.item<double>();
      if (step == 0) first = last;
      engine.backward(loss);
      EXPECT_TRUE(engine.step().applied());
    }
    EXPECT_LT(last, 0.5 * first);
    EXPECT_TRUE(engine.full_state("h.0.up.weight", "momentum_buffer").defined());
    EXPECT_FALSE(engine.full_state("h.0.up.weight", "exp_avg").defined());
    EXPECT_TRUE(engine.full_state("h.0.up.bias", "exp_avg").defined());
  });
}

TEST(Muon, LeavesAllToAdamWIfTheConfigurationSaysSo) {
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    const Engine engine = engine_of(*model, world, muon_config(R"("use_muon": false)"));
    ASSERT_EQ(engine.num_groups(), 1);
    EXPECT_EQ(engine.hyperparameters(0).get("use_muon"), 0.0);
    EXPECT_EQ(names_of(engine, 0).size(), model->named_parameters().size() - 1);
  });
}

TEST(Muon, RefusesAVectorByName) {
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    InitOptions options;
    options.world = world;
    options.optimizer = "Muon";
    options.groups = {{{"norm.weight"}, Hyperparameters("Muon")}};
    try {
      initialize(*model, config_of(1), options);
      ADD_FAILURE() << "accepted";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("parameter 'norm.weight' has shape [20], but Muon steps whole matrices"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(OneBitAdam, IsRefusedByNameAtStagesThatShard) {
  run_ranks(1, [](const World& world) {
    for (const int stage : {1, 2, 3}) {
      TinyModel model = make_tiny();
      InitOptions options;
      options.world = world;
      options.optimizer = "OneBitAdam";
      try {
        initialize(*model, config_of(stage), options);
        ADD_FAILURE() << "accepted at stage " << stage;
      } catch (const ConfigError& error) {
        const std::string expected =
            "zero_optimization.stage is " + std::to_string(stage) + ", but OneBitAdam needs stage 0";
        EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
      }
    }
  });
}

TEST(Hyperparameters, AreRefusedByNameOutOfTheirRange) {
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(1));
    const Hyperparameters before = engine.hyperparameters(0);
    const auto refusal = [&](const char* name, double value) -> std::string {
      Hyperparameters spoilt = before;
      try {
        engine.set_hyperparameters(0, spoilt.set(name, value));
      } catch (const c10::ValueError& error) {
        return error.what();
      }
      return "";
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_NE(refusal("lr", nan).find("lr is nan, expected a number of at least 0"), std::string::npos);
    EXPECT_NE(refusal("lr", -1.0).find("lr is -1"), std::string::npos);
    EXPECT_NE(refusal("beta2", 1.0).find("beta2 is 1, expected a number in [0, 1)"), std::string::npos);
    EXPECT_NE(refusal("eps", std::numeric_limits<double>::infinity()).find("eps is inf"), std::string::npos);
    EXPECT_EQ(engine.hyperparameters(0), before);
    EXPECT_EQ(refusal("lr", 0.5), "");
    EXPECT_EQ(engine.hyperparameters(0).lr(), 0.5);
  });
}

}  // namespace
}  // namespace deeptide
