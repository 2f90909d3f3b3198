// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Models whose layers are compressed train alike however they are sharded, and go on exactly where a checkpoint was.
#include "deeptide/compression.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "engine/models.h"
#include "ranks.h"

namespace deeptide::compressed_training {
namespace {

using at::Tensor;

constexpr const char* kSection = R"({"compression_training": {
  "weight_quantization": {"shared_parameters": {"enabled": true, "schedule_offset": 1, "quantize_groups": 4,
      "rounding": "stochastic"}, "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 4,
      "quantization_period": 2}, "modules": ["up", "embed"]}}},
  "activation_quantization": {"shared_parameters": {"enabled": true, "schedule_offset": 2},
      "different_groups": {"all": {"params": {"bits": 8}, "modules": ["down"]}}},
  "row_pruning": {"shared_parameters": {"enabled": true, "schedule_offset": 0},
      "different_groups": {"all": {"params": {"dense_ratio": 0.5}, "modules": ["up"]}}},
  "sparse_pruning": {"shared_parameters": {"enabled": true, "schedule_offset": 1, "method": "topk"},
      "different_groups": {"all": {"params": {"dense_ratio": 0.6}, "modules": ["down"]}}}}})";

struct SmallImpl : torch::nn::Module {
  SmallImpl() : embed(kVocabulary, kWidth), up(kWidth, 2 * kWidth), down(2 * kWidth, kVocabulary) {
    register_module("embed", embed);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    return torch::nn::functional::cross_entropy(down(torch::relu(up(embed(tokens)))), targets);
  }
  torch::nn::Embedding embed;
  torch::nn::Linear up;
  CompressedLinear down;
};
TORCH_MODULE(Small);

struct Session {
  Session(const World& world, int stage)
      : world(world),
        config(config_of(stage, 2, 1, false, Ranks::apart).with(kSection)),
        model(make_seeded([] { return Small(); })) {
    make_seeded([&] {
      compression = init_compression(*model, config);
      return 0;
    });
    engine.emplace(engine_of(*model, world, config));
    compression->share_masks([this](const Tensor& mask, int source) { engine->broadcast(mask, source); });
  }

  double step(int64_t number) {
    const auto [tokens, targets] = batch_of(number, 2 * world.size);
    compression->before_forward();
    const Tensor loss = model(tokens.narrow(0, 2 * world.rank, 2), targets.narrow(0, 2 * world.rank, 2));
    engine->backward(loss);
    if (engine->step().applied()) compression->step();
    return loss.item<double>();
  }

  World world;
  Config config;
  Small model;
  std::unique_ptr<Compression> compression;
  std::optional<Engine> engine;
};

struct Results {
  std::vector<double> losses;
  std::vector<Tensor> weights;
};

void expect_equal(const Results& found, const Results& wanted) {
  EXPECT_EQ(found.losses, wanted.losses);
  ASSERT_EQ(found.weights.size(), 7);
  ASSERT_EQ(wanted.weights.size(), 7);
  for (size_t i = 0; i < wanted.weights.size(); ++i) EXPECT_TRUE(found.weights[i].equal(wanted.weights[i])) << i;
}

Results trained(int stage, int64_t from, const std::string& folder) {
  Results results;
  run_ranks(2, [&](const World& world) {
    Session session(world, stage);
    if (from > 0) {
      const auto loaded = session.engine->load_checkpoint(folder);
      ASSERT_TRUE(loaded && session.compression->take_state(loaded->client_state_json));
    }
    for (int64_t number = from; number < 7; ++number) {
      const double loss = session.step(number);
      if (world.rank == 0) results.losses.push_back(loss);
      if (number == 3 && from == 0) session.engine->save_checkpoint(folder, "", session.compression->add_state("{}"));
    }
    for (const auto& item : session.engine->module_state_dict(0)) results.weights.push_back(item.tensor);
  });
  return results;
}

TEST(Compression, TrainsAlikeWhereItIsShardedAndGoesOnWhereItWas) {
  const auto folder = std::filesystem::temp_directory_path() / ("deeptide_compression_" + std::to_string(::getpid()));
  Results whole;
  for (const int stage : {0, 3}) {
    const Results straight = trained(stage, 0, folder / std::to_string(stage));
    if (stage == 0) {
      whole = straight;
      EXPECT_NE(straight.losses.front(), straight.losses.back());
    }
    expect_equal(straight, whole);
    Results resumed = trained(stage, 4, folder / std::to_string(stage));
    resumed.losses.insert(resumed.losses.begin(), whole.losses.begin(), whole.losses.begin() + 4);
    expect_equal(resumed, whole);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace deeptide::compressed_training
