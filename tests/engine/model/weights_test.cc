// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Weights that others saved come into a module, built in memory or under zero::Init.
#include "deeptide/weights.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "deeptide/errors.h"
#include "deeptide/zero.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide {
namespace {

class Weights : public testing::Test {
 protected:
  Weights() {
    run_ranks(1, [&](const World& world) {
      TinyModel model = make_tiny();
      torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.add_(0.5);
      Engine engine = engine_of(*model, world, config_of(0));
      std::filesystem::create_directories(folder_);
      engine.export_safetensors(folder_ + "/model.safetensors");
      saved_ = engine.module_state_dict();
    });
  }
  ~Weights() override { std::filesystem::remove_all(folder_); }

  std::string folder_ = testing::TempDir() + "deeptide_weights_" + std::to_string(::getpid());
  std::vector<NamedTensor> saved_;
};

TEST_F(Weights, ReachEveryRankAtEveryStage) {
  for (const int stage : {0, 2, 3}) {
    for (const bool deferred : {false, true}) {
      run_ranks(2, [&](const World& world) {
        TinyModel model = make_seeded([&] {
          std::unique_ptr<zero::Init> scope;
          if (deferred) scope = std::make_unique<zero::Init>(/*min_bytes=*/256);
          TinyModel made;
          EXPECT_TRUE(load_weights(*made, folder_).missing.empty());
          return made;
        });
        EXPECT_EQ(zero::is_deferred(model->embed->weight), deferred);
        Engine engine = engine_of(*model, world, config_of(stage, 2, 1, false, Ranks::apart));
        const auto state = engine.module_state_dict();
        ASSERT_EQ(state.size(), saved_.size());
        for (size_t i = 0; i < state.size(); ++i) {
          EXPECT_TRUE(at::equal(state[i].tensor, saved_[i].tensor)) << state[i].name << ", stage " << stage;
        }
      });
    }
  }
}

TEST_F(Weights, OfAnotherModelAreRefusedByName) {
  TinyModel deeper(4);
  const std::string error = error_of([&] { load_weights(*deeper, folder_); });
  EXPECT_NE(error.find("they lack 'h.3."), std::string::npos) << error;
  EXPECT_EQ(load_weights(*deeper, folder_, /*strict=*/false).missing.size(), 6u);
  torch::nn::Embedding other(kVocabulary, kWidth);
  EXPECT_NE(error_of([&] { load_weights(*other, folder_); }).find("the model lacks 'embed.weight'"), std::string::npos);
  TinyModel wide = make_tiny();
  wide->norm->weight.set_data(at::ones({kWidth + 1}));
  EXPECT_NE(
      error_of([&] { load_weights(*wide, folder_); }).find("'norm.weight' has shape (21) in the model and (20) in"),
      std::string::npos);
}

TEST_F(Weights, OfAnIndexAreInItsFolder) {
  const auto index = [&](const std::string& map) {
    std::ofstream(folder_ + "/model.safetensors.index.json") << R"({"weight_map": {)" << map << "}}";
  };
  index(R"("norm.weight": "model.safetensors")");
  const WeightFile one(folder_);
  EXPECT_EQ(one.names(), std::vector<std::string>{"norm.weight"});
  EXPECT_TRUE(at::equal(one.tensor("norm.weight"), at::full({kWidth}, 1.5)));
  EXPECT_NE(error_of([&] { one.tensor("head"); }).find("no tensor 'head'"), std::string::npos);
  index(R"("norm.weight": "../model.safetensors")");
  EXPECT_NE(error_of([&] { WeightFile{folder_}; }).find("is no file of its folder"), std::string::npos);
  index(R"("norm": "model.safetensors")");
  EXPECT_NE(error_of([&] { WeightFile{folder_}; }).find("places 'norm' in model.safetensors, which does not have it"),
            std::string::npos);
  EXPECT_NE(error_of([&] { WeightFile{folder_ + "/none"}; }).find("none"), std::string::npos);
  std::filesystem::remove(folder_ + "/model.safetensors.index.json");
  std::filesystem::remove(folder_ + "/model.safetensors");
  EXPECT_NE(error_of([&] { WeightFile{folder_}; }).find("it has neither model.safetensors nor"), std::string::npos);
}

}  // namespace
}  // namespace deeptide
