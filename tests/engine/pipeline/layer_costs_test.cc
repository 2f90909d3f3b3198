// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Times and bytes of a pipeline's layers, and cuts by them, on all ranks alike.
#include "engine/pipeline/layer_costs.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <thread>

#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide::costs {
namespace {

using at::Tensor;
using engine::bytes_of_layers;
using engine::LayerBytes;
using engine::seconds_of_layers;
using Bytes = std::vector<double>;

PipelineLayer sleeping(int ms) {
  return PipelineLayer::function([ms](const Tensor& x) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    const Tensor y = x * 1;
    if (y.requires_grad())
      y.register_hook([ms](const Tensor&) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
    return y;
  });
}

TEST(LayerCosts, AreForwardAndBackwardAndLeaveTheModelAsItWas) {
  const torch::nn::Linear linear(3, 3);
  const torch::nn::BatchNorm1d norm(3);
  const std::vector<PipelineLayer> layers = {linear, sleeping(30), norm, PipelineLayer::make<torch::nn::Linear>(3, 3)};
  torch::manual_seed(1);
  const std::vector<double> seconds = seconds_of_layers(layers, {torch::ones({2, 3})});
  EXPECT_GE(seconds.at(1), 0.06);
  EXPECT_LT(std::max(seconds.at(0), seconds.at(3)), 0.06);
  EXPECT_FALSE(linear->weight.grad().defined());
  EXPECT_TRUE(norm->running_mean.equal(torch::zeros(3)));
  const Tensor drawn = torch::rand(1);
  torch::manual_seed(1);
  EXPECT_TRUE(drawn.equal(torch::rand(1)));
}

TEST(LayerCosts, AreStatesAndBytesThatBackwardKeeps) {
  const auto embedding = [] { return torch::nn::Embedding(19, 12); };
  torch::nn::Linear frozen(12, 6);
  for (Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  const std::vector<PipelineLayer> layers = {
      PipelineLayer::tied("embedding", embedding),
      PipelineLayer::function([](const Tensor& x) { return x.flatten(0, 1); }),
      frozen,
      PipelineLayer::function([](const Tensor& x) { return torch::tanh(x); }),
      PipelineLayer::make<torch::nn::Linear>(torch::nn::LinearOptions(6, 12).bias(false)),
      PipelineLayer::function([](const Tensor& x) {
        return Activations{x * 2, torch::arange(1000)};
      }),
      PipelineLayer::tied(
          "embedding", embedding,
          [](torch::nn::EmbeddingImpl& tied, const Activations& x) { return torch::linear(x.at(0), tied.weight); }),
  };
  const LayerBytes found = bytes_of_layers(layers, {torch::zeros({5, 7}, torch::kLong)});
  constexpr double kRows = 5 * 7;
  EXPECT_EQ(found.states, (Bytes{20.0 * 19 * 12, 0, 4 * (12 * 6 + 6), 0, 20 * 6 * 12, 0, 0}));
  // The tokens; nothing but its weight for a frozen layer; tanh's output, which the next layer keeps too; its input.
  EXPECT_EQ(found.kept, (Bytes{8 * kRows, 0, 0, 4 * kRows * 6, 0, 0, 4 * kRows * 12}));
}

PipelineOptions options_of(const World& world, PipelinePartition partition, const Tensor& sample) {
  PipelineOptions options{.num_stages = 2, .partition = partition, .profile_input = {sample}};
  options.world = world;
  return options;
}

TEST(LayerCosts, OfRankZeroCutOnAllRanks) {
  std::vector<std::vector<int64_t>> by_time(2), by_memory(2);
  run_ranks(2, [&](const World& world) {
    std::vector<PipelineLayer> layers;
    for (int i = 0; i < 7; ++i) layers.push_back(sleeping(i == (world.rank == 0 ? 6 : 0) ? 30 : 0));
    const Tensor sample = torch::ones({64, 8});
    by_time[world.rank] = PipelineModule(layers, options_of(world, PipelinePartition::profile, sample)).bounds();
    layers.assign(6, PipelineLayer::function([](const Tensor& x) { return torch::tanh(x); }));
    by_memory[world.rank] = PipelineModule(layers, options_of(world, PipelinePartition::memory, sample)).bounds();
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(by_time[rank], (std::vector<int64_t>{0, 6, 7}));
    EXPECT_EQ(by_memory[rank], (std::vector<int64_t>{0, 2, 6}));  // the first stage has two micro-batches alive
  }
}

TEST(LayerCosts, TrainAModelThatIsCutByThem) {
  for (const auto partition : {PipelinePartition::profile, PipelinePartition::memory}) {
    run_ranks(2, [&](const World& world) {
      std::vector<PipelineLayer> layers = {PipelineLayer::make<torch::nn::Embedding>(kVocabulary, kWidth)};
      for (int i = 0; i < 3; ++i) layers.push_back(PipelineLayer::make<Block>());
      layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, kVocabulary));
      const auto [tokens, targets] = batch_of(0, 2);
      const auto model = std::make_shared<PipelineModule>(layers, options_of(world, partition, tokens));
      const auto loss = [](const Activations& outputs, const Activations& wanted) {
        return torch::nn::functional::cross_entropy(outputs.at(0), wanted.at(0));
      };
      PipelineEngine engine(model, loss, config_of(1, 2, 2));
      const PipelineEngine::Batches next = [&, given = MicroBatch{{tokens}, {targets}}] { return given; };
      const double first = engine.train_batch(next).loss;
      for (int step = 0; step < 5; ++step) engine.train_batch(next);
      EXPECT_LT(engine.eval_batch(next, 1), first);
    });
  }
}

TEST(LayerCosts, NameALayerThatFailsOnAllRanks) {
  std::vector<std::string> errors(2), without(2);
  run_ranks(2, [&](const World& world) {
    const std::vector<PipelineLayer> layers = {PipelineLayer::make<torch::nn::Linear>(2, 2),
                                               PipelineLayer::make<torch::nn::Linear>(3, 3)};
    PipelineOptions options = options_of(world, PipelinePartition::memory, torch::ones({1, 2}));
    errors[world.rank] = error_of([&] { PipelineModule(layers, options); });
    options.profile_input.clear();
    without[world.rank] = error_of([&] { PipelineModule(layers, options); });
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(errors[rank].find("partition \"memory\": layer 1 ("), std::string::npos) << errors[rank];
    EXPECT_NE(without[rank].find("give profile_input"), std::string::npos) << without[rank];
  }
}

}  // namespace
}  // namespace deeptide::costs
