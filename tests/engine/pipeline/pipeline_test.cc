// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A list of layers over stages, in C++: the bits of one stage alone, its checkpoints, and what it refuses.
#include "deeptide/pipeline.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "checkpoint/scratch.h"
#include "deeptide/pipeline_partition.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide::listed {
namespace {

using at::Tensor;

constexpr int kData = 2, kSteps = 3;
constexpr int64_t kMicro = 2, kAccumulation = 4;

/// Hands on two tensors, one of which is no function of a weight before.
struct ForkImpl : torch::nn::Module {
  ForkImpl() : scale(register_parameter("scale", torch::ones(kWidth))) {}
  Activations forward(const Tensor& x) { return {x * scale, torch::arange(x.size(0))}; }
  Tensor scale;
};
TORCH_MODULE(Fork);

struct JoinImpl : torch::nn::Module {
  JoinImpl() : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))) {}
  Tensor forward(const Activations& inputs) {
    return norm(inputs.at(0)) + 0.01 * inputs.at(1).unsqueeze(1).to(inputs.at(0).dtype());
  }
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Join);

struct Cut {
  int stages = 1, chunks = 1;
  std::string schedule = "1f1b";
  int interval = 0;
};

std::vector<PipelineLayer> layers_with(bool tied) {
  std::vector<PipelineLayer> layers;
  const auto make = [] { return torch::nn::Embedding(kVocabulary, kWidth); };
  layers.push_back(tied ? PipelineLayer::tied("embed", make) : PipelineLayer(make()));
  for (int i = 0; i < 3; ++i) layers.push_back(PipelineLayer::make<Block>());
  layers.push_back(PipelineLayer::make<Fork>());
  layers.push_back(PipelineLayer::make<Join>());
  layers.push_back(PipelineLayer::function([](const Tensor& x) { return torch::tanh(x); }));
  layers.push_back(PipelineLayer::make<Block>());
  if (tied) {
    layers.push_back(PipelineLayer::tied("embed", make, [](torch::nn::EmbeddingImpl& embed, const Tensor& x) {
      return torch::linear(x, embed.weight);
    }));
  } else {
    layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, kVocabulary));
  }
  return layers;
}

PipelineOptions options_of(const World& world, const Cut& cut) {
  PipelineOptions options;
  options.num_stages = cut.stages;
  options.chunks = cut.chunks;
  options.partition = PipelinePartition::uniform;
  options.activation_checkpoint_interval = cut.interval;
  options.seed = 5;
  options.world = world;
  return options;
}

std::shared_ptr<PipelineModule> module_of(const World& world, const Cut& cut, bool tied) {
  return make_seeded([&] {
    torch::manual_seed(4);
    return std::make_shared<PipelineModule>(layers_with(tied), options_of(world, cut));
  });
}

Tensor loss_of(const Activations& outputs, const Activations& targets) {
  return torch::nn::functional::cross_entropy(outputs.at(0).to(torch::kFloat), targets.at(0));
}

Config config_at(int zero_stage, const Cut& cut, bool bf16 = false) {
  return config_of(zero_stage, kMicro, kAccumulation, bf16, Ranks::apart)
      .with(R"({"parallel": {"schedule": ")" + cut.schedule + R"("}})");
}

/// The data rank's own, in order.
PipelineEngine::Batches batches_of(const PipelineEngine& engine) {
  return [&engine, next = int64_t{0}]() mutable {
    const auto [tokens, targets] = batch_of(next++, kMicro * kData);
    const int64_t first = engine.data_rank() * kMicro;
    return MicroBatch{{tokens.narrow(0, first, kMicro)}, {targets.narrow(0, first, kMicro)}};
  };
}

struct Trained {
  std::vector<double> losses, norms;
  double held_out = 0.0;
  std::map<std::string, Tensor> weights;
};

void note_weights(PipelineEngine& engine, Trained& trained) {
  for (const auto& item : engine.model().named_parameters()) {
    trained.weights[item.key()] = engine.engine().full_state(item.key(), "master");
  }
}

Trained train(const World& world, const Cut& cut, const Config& config, bool tied) {
  PipelineEngine engine(module_of(world, cut, tied), loss_of, config);
  EXPECT_EQ(engine.data_rank(), world.rank % kData);
  EXPECT_EQ(engine.data_size(), kData);
  Trained trained;
  const auto next = batches_of(engine);
  for (int step = 0; step < kSteps; ++step) {
    const PipelineStep done = engine.train_batch(next);
    EXPECT_TRUE(done.outcome.applied()) << done.outcome.reason;
    trained.losses.push_back(done.loss);
    trained.norms.push_back(done.outcome.grad_norm);
  }
  trained.held_out = engine.eval_batch(next, 3);
  note_weights(engine, trained);
  return trained;
}

/// Bit for bit, but for norms, whose sums over stages have an order of their own; of ties, whose gradients are added
/// over stages, within `tolerance`.
void expect_equal(const Trained& found, const Trained& wanted, double tolerance) {
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(found.losses[step], wanted.losses[step], tolerance);
    EXPECT_NEAR(found.norms[step], wanted.norms[step], (tolerance + 1e-12) * wanted.norms[step]);
  }
  EXPECT_NEAR(found.held_out, wanted.held_out, tolerance);
  for (const auto& [name, weight] : found.weights) {
    EXPECT_LE((weight - wanted.weights.at(name)).abs().max().item<double>(), tolerance) << name;
  }
}

void expect_trained_as_one_stage(const Cut& cut, int zero_stage, bool tied, bool bf16 = false) {
  SCOPED_TRACE(cut.schedule + ", " + std::to_string(cut.stages) + " stages, ZeRO " + std::to_string(zero_stage));
  const double tolerance = tied ? 1e-5 : 0.0;
  // Clipping follows the norm, whose last bit the cut decides.
  const auto config = [&](const Cut& one) {
    return config_at(zero_stage, one, bf16).with(R"({"gradient_clipping": 0.0})");
  };
  std::vector<Trained> whole(kData), parts(cut.stages * kData);
  run_ranks(kData, [&](const World& world) { whole[world.rank] = train(world, {}, config({}), tied); });
  run_ranks(cut.stages * kData, [&](const World& world) { parts[world.rank] = train(world, cut, config(cut), tied); });
  size_t num_weights = 0;
  for (int rank = 0; rank < cut.stages * kData; ++rank) {
    expect_equal(parts[rank], whole[rank % kData], tolerance);
    if (rank % kData == 0) num_weights += parts[rank].weights.size();
  }
  EXPECT_EQ(num_weights, whole[0].weights.size());
  EXPECT_LT(whole[0].losses.back(), whole[0].losses.front());
}

TEST(Pipeline, TrainsAsOneStageDoesBitForBit) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    for (const Cut& cut : {Cut{2, 1, "1f1b"}, Cut{3, 1, "gpipe"}}) expect_trained_as_one_stage(cut, zero_stage, false);
  }
  expect_trained_as_one_stage({2, 1, "1f1b"}, 2, false, true);
}

TEST(Pipeline, TrainsChunksAsOneStageDoesBitForBit) {
  for (const int zero_stage : {1, 3}) expect_trained_as_one_stage({2, 2, "interleaved"}, zero_stage, false);
}

TEST(Pipeline, TrainsWithGradientsOfWeightsApartBitForBit) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    expect_trained_as_one_stage({3, 1, "zero_bubble"}, zero_stage, false, zero_stage == 2);
  }
  expect_trained_as_one_stage({2, 1, "zero_bubble", 2}, 3, false);
}

TEST(Pipeline, TrainsRecomputedLayersAsKeptOnesBitForBit) {
  for (const int zero_stage : {0, 3}) {
    expect_trained_as_one_stage({2, 1, "1f1b", 1}, zero_stage, false);
    expect_trained_as_one_stage({2, 2, "interleaved", 2}, zero_stage, false);
  }
  expect_trained_as_one_stage({2, 1, "1f1b", 3}, 1, true);
}

TEST(Pipeline, TrainsWeightsThatStagesShare) {
  for (const int zero_stage : {0, 3}) {
    expect_trained_as_one_stage({2, 1, "1f1b"}, zero_stage, true);
    expect_trained_as_one_stage({2, 2, "interleaved"}, zero_stage, true);
    expect_trained_as_one_stage({3, 1, "zero_bubble"}, zero_stage, true);
  }
}

TEST(Pipeline, ResumesOverAnotherCut) {
  const checkpoint::Scratch scratch;
  const std::vector<Cut> cuts = {{2, 1, "1f1b"}, {1, 1, "1f1b"}, {3, 1, "gpipe"}};
  std::vector<double> losses(cuts.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    run_ranks(cuts[i].stages * kData, [&](const World& world) {
      PipelineEngine engine(module_of(world, cuts[i], true), loss_of, config_at(i == 0 ? 1 : 2, cuts[i]));
      const auto next = batches_of(engine);
      if (i == 0) {
        engine.train_batch(next);
        engine.engine().save_checkpoint(scratch.path(), "here");
      } else {
        EXPECT_TRUE(engine.engine().load_checkpoint(scratch.path(), "here"));
      }
      const double loss = engine.train_batch(batches_of(engine)).loss;
      if (world.rank == 0) losses[i] = loss;
    });
  }
  EXPECT_NEAR(losses[1], losses[0], 1e-5);
  EXPECT_NEAR(losses[2], losses[0], 1e-5);
}

TEST(Pipeline, TakesTheBlocksOfAModelThatIsThere) {
  run_ranks(2, [](const World& world) {
    const TinyModel model = make_tiny();
    std::vector<PipelineLayer> layers = {model->embed};
    for (PipelineLayer& block : layers_of<Block>(*model->blocks)) layers.push_back(std::move(block));
    layers.emplace_back(model->norm);
    layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, kVocabulary));
    const auto module = std::make_shared<PipelineModule>(layers, options_of(world, {2, 1, "1f1b"}));
    PipelineEngine engine(module, loss_of, config_at(2, {}));
    const auto next = batches_of(engine);
    const double first = engine.train_batch(next).loss;
    for (int step = 0; step < 5; ++step) engine.train_batch(batches_of(engine));
    EXPECT_LT(engine.eval_batch(batches_of(engine), kAccumulation), first);
    EXPECT_NE(error_of([&] { layers_of<Fork>(*model->blocks); }).find("no module of the type"), std::string::npos);
  });
}

std::string refusal(const Cut& cut, const Config& config, int ranks = 2) {
  std::string text;
  run_ranks(ranks, [&](const World& world) {
    const std::string error = error_of([&] { PipelineEngine(module_of(world, cut, false), loss_of, config); });
    if (world.rank == 0) text = error;
  });
  return text;
}

TEST(Pipeline, RefusesWhatCannotBe) {
  EXPECT_NE(refusal({2, 2}, config_at(0, {2, 2, "zero_bubble"})).find("2 chunks on each stage"), std::string::npos);
  EXPECT_NE(refusal({2}, config_at(0, {2, 1, "interleaved"})).find("1 chunks on each stage"), std::string::npos);
  EXPECT_NE(refusal({2, 2}, config_at(0, {2, 2, "gpipe"})).find("2 chunks on each stage"), std::string::npos);
  EXPECT_NE(refusal({2}, config_at(0, {}).with(R"({"parallel": {"pipeline": 3}})")).find("has 2; leave the key out"),
            std::string::npos);
  const std::string cut = R"({"parallel": {"pipeline": {"stages": 2, "cut": ["3"]}}})";
  EXPECT_NE(refusal({2}, config_at(0, {}).with(cut)).find("parallel.pipeline.cut is given"), std::string::npos);
  EXPECT_NE(refusal({3}, config_at(0, {})).find("no multiple of the stages"), std::string::npos);
  EXPECT_NE(refusal({2, 0}, config_at(0, {})).find("expected 1 or more runs"), std::string::npos);
  EXPECT_NE(refusal({2, 1, "1f1b", -1}, config_at(0, {})).find("activation_checkpoint_interval: got -1"),
            std::string::npos);
}

TEST(Pipeline, RecomputesAsManyLayersTogetherAsTheConfigurationSays) {
  for (const int interval : {0, 2}) {
    const std::string section = R"({"pipeline": {"activation_checkpoint_interval": )" + std::to_string(interval) + "}}";
    run_ranks(1, [&](const World& world) {
      int calls = 0;
      std::vector<PipelineLayer> layers = layers_with(false);
      layers.insert(layers.begin() + 1, PipelineLayer::function([&](const Tensor& x) {
                      ++calls;
                      return torch::tanh(x);
                    }));
      const auto model = std::make_shared<PipelineModule>(layers, options_of(world, {}));
      PipelineEngine engine(model, loss_of, config_at(0, {}).with(section));
      engine.train_batch(batches_of(engine));
      EXPECT_EQ(calls, kAccumulation * (interval == 0 ? 1 : 2));
    });
  }
}

TEST(Pipeline, RefusesBoundsOfOtherLayers) {
  run_ranks(2, [](const World& world) {
    PipelineOptions options = options_of(world, {2});
    options.bounds = {0, 10, 9};
    EXPECT_NE(error_of([&] { PipelineModule(layers_with(false), options); }).find("bounds: got 3"), std::string::npos);
  });
}

/// Trains with the first `frozen` layers frozen; 9: all.
Trained train_frozen(const World& world, const Cut& cut, const Config& config, int64_t frozen) {
  const auto model = module_of(world, cut, false);
  for (const auto& child : model->named_children()) {
    if (std::stoll(child.key()) >= frozen) continue;
    for (at::Tensor& parameter : child.value()->parameters()) parameter.set_requires_grad(false);
  }
  PipelineEngine engine(model, loss_of, config);
  Trained trained;
  const auto next = batches_of(engine);
  for (int step = 0; step < kSteps; ++step) trained.losses.push_back(engine.train_batch(next).loss);
  EXPECT_EQ(engine.engine().global_steps(), kSteps);
  return trained;
}

TEST(Pipeline, AStageThatTrainsNothingGivesTheBitsOfTheUncutModel) {
  for (const Cut& cut : {Cut{2}, Cut{3}, Cut{2, 2}, Cut{3, 1, "zero_bubble"}}) {
    for (const int zero_stage : {0, 1, 2, 3}) {
      std::vector<Trained> found(cut.stages * kData), uncut(kData);
      run_ranks(kData,
                [&](const World& world) { uncut[world.rank] = train_frozen(world, {}, config_at(zero_stage, {}), 7); });
      run_ranks(cut.stages * kData, [&](const World& world) {
        found[world.rank] = train_frozen(world, cut, config_at(zero_stage, cut), 7);
      });
      EXPECT_NE(uncut[0].losses.front(), uncut[0].losses.back());
      for (const Trained& each : found) EXPECT_EQ(each.losses, uncut[0].losses);
    }
  }
}

TEST(Pipeline, StagesThatAllTrainNothingAreRefusedOnAllRanks) {
  std::vector<std::string> errors(2 * kData);
  run_ranks(2 * kData, [&](const World& world) {
    errors[world.rank] = error_of([&] { train_frozen(world, {2}, config_at(1, {}), 9); });
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("on all of each of its 2 stages"), std::string::npos) << error;
  }
}

TEST(Pipeline, AStageThatFailsIsNamedToTheOthers) {
  std::vector<std::string> errors(2);
  run_ranks(2, [&](const World& world) {
    PipelineEngine engine(module_of(world, {2}, false), loss_of, config_at(1, {}));
    const PipelineEngine::Batches next = [&]() -> MicroBatch { throw std::runtime_error("the file is gone"); };
    errors[world.rank] =
        error_of([&] { engine.train_batch(world.rank == 1 ? next : PipelineEngine::Batches(batches_of(engine))); });
  });
  EXPECT_EQ(errors[1], "the file is gone");
  EXPECT_NE(errors[0].find("the file is gone"), std::string::npos) << errors[0];
}

/// Hands on a buffer that its next forward changes in place.
struct ShiftImpl : torch::nn::Module {
  ShiftImpl() : shift(register_buffer("shift", torch::ones(1))) {}
  Activations forward(const Tensor& x) {
    shift.mul_(0.5);
    return {x, shift};
  }
  Tensor shift;
};
TORCH_MODULE(Shift);

/// Writes into what it is handed.
struct AddImpl : torch::nn::Module {
  AddImpl() : position(register_parameter("position", torch::ones(kWidth) / 3)) {}
  Tensor forward(const Activations& inputs) {
    Tensor x = inputs.at(0);
    x += position + inputs.at(1);
    return x;
  }
  Tensor position;
};
TORCH_MODULE(Add);

std::vector<PipelineLayer> layers_between(const std::vector<PipelineLayer>& middle) {
  std::vector<PipelineLayer> layers = {PipelineLayer::make<torch::nn::Embedding>(kVocabulary, kWidth)};
  layers.insert(layers.end(), middle.begin(), middle.end());
  layers.push_back(PipelineLayer::make<Block>());
  layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, kVocabulary));
  return layers;
}

Trained train_layers(const World& world, const Cut& cut, const std::vector<PipelineLayer>& layers) {
  PipelineOptions options = options_of(world, cut);
  if (cut.stages == 2) options.bounds = {0, 2, std::ssize(layers)};
  const auto module = make_seeded([&] { return std::make_shared<PipelineModule>(layers, options); });
  const Config config = config_of(0, kMicro, kAccumulation, false, Ranks::apart)
                            .with(R"({"gradient_clipping": 0.0, "parallel": {"schedule": ")" + cut.schedule + R"("}})");
  PipelineEngine engine(module, loss_of, config);
  Trained trained;
  int64_t number = 0;
  const auto next = [&number] {
    const auto [tokens, targets] = batch_of(number++, kMicro);
    return MicroBatch{{tokens}, {targets}};
  };
  for (int step = 0; step < kSteps; ++step) {
    const PipelineStep done = engine.train_batch(next);
    EXPECT_TRUE(done.outcome.applied()) << done.outcome.reason;
    trained.losses.push_back(done.loss);
    trained.norms.push_back(done.outcome.grad_norm);
  }
  return trained;
}

void expect_layers_trained_as_on_one_stage(const std::vector<PipelineLayer>& middle, const std::string& schedule) {
  Trained whole;
  std::vector<Trained> parts(2);
  const auto layers = layers_between(middle);
  run_ranks(1, [&](const World& world) { whole = train_layers(world, {}, layers); });
  run_ranks(2, [&](const World& world) { parts[world.rank] = train_layers(world, {2, 1, schedule}, layers); });
  for (const Trained& found : parts) {
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(found.losses[step], whole.losses[step], 1e-6);
      EXPECT_NEAR(found.norms[step], whole.norms[step], 1e-5 * whole.norms[step]);
    }
  }
}

TEST(Pipeline, SendsWhatALayerReturnedThoughItWritesThereLaterAndWritesIntoWhatItIsHanded) {
  for (const char* schedule : {"1f1b", "gpipe", "zero_bubble"}) {
    expect_layers_trained_as_on_one_stage({PipelineLayer::make<Shift>(), PipelineLayer::make<Add>()}, schedule);
  }
}

TEST(Pipeline, TrainsWhereAStageDetaches) {
  const auto pass = PipelineLayer::function([](const Tensor& x) { return torch::tanh(x); });
  const auto detach = PipelineLayer::function([](const Tensor& x) { return x.detach(); });
  expect_layers_trained_as_on_one_stage({pass, detach}, "1f1b");
}

struct CountingImpl : torch::nn::Module {
  CountingImpl()
      : weight(register_parameter("weight", torch::ones(kWidth))), calls(register_buffer("calls", torch::zeros({1}))) {}
  Tensor forward(const Tensor& x) {
    if (is_training()) calls.add_(1);
    return x * weight;
  }
  Tensor weight, calls;
};
TORCH_MODULE(Counting);

TEST(Pipeline, ABufferThatAForwardWritesIsNotSharedByStages) {
  std::vector<std::string> errors(2);
  run_ranks(2, [&](const World& world) {
    std::vector<PipelineLayer> layers{PipelineLayer::make<torch::nn::Embedding>(kVocabulary, kWidth)};
    for (int i = 0; i < 2; ++i) {
      layers.push_back(PipelineLayer::tied("norm", [] { return Counting(); }));
      layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, i == 0 ? kWidth : kVocabulary));
    }
    PipelineEngine engine(std::make_shared<PipelineModule>(layers, options_of(world, {2})), loss_of, config_at(0, {}));
    const auto next = [] {
      const auto [tokens, targets] = batch_of(0, kMicro);
      return MicroBatch{{tokens}, {targets}};
    };
    errors[world.rank] = error_of([&] { engine.train_batch(next); });
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("'tied_modules.norm.calls' is written in forward, and stages 0, 1 use"), std::string::npos)
        << error;
  }
}

TEST(Pipeline, AFirstLayerMayWriteIntoItsMicroBatch) {
  run_ranks(2, [](const World& world) {
    std::vector<PipelineLayer> layers{PipelineLayer::function([](const Tensor& x) { return x.add_(1).remainder_(5); })};
    layers.push_back(PipelineLayer::make<torch::nn::Embedding>(kVocabulary, kWidth));
    layers.push_back(PipelineLayer::make<Block>());
    layers.push_back(PipelineLayer::make<torch::nn::Linear>(kWidth, kVocabulary));
    PipelineEngine engine(std::make_shared<PipelineModule>(layers, options_of(world, {2})), loss_of, config_at(0, {}));
    const auto next = [] {
      const auto [tokens, targets] = batch_of(0, kMicro);
      return MicroBatch{{tokens.clone()}, {targets.clone()}};
    };
    EXPECT_TRUE(engine.train_batch(next).outcome.applied());
  });
}

TEST(Pipeline, FirstAndLastStageHaveTheSameMicroBatches) {
  for (const bool parts : {false, true}) {
    run_ranks(2, [&](const World& world) {
      PipelineEngine engine(module_of(world, {2}, false), loss_of, config_at(0, {}));
      const auto next = [&] {  // as by a generator of each stage's own
        const auto [tokens, targets] = batch_of(world.rank, kMicro);
        if (!parts) return MicroBatch{{tokens}, {targets}};
        return world.rank == 0 ? MicroBatch{{tokens}, {}} : MicroBatch{{}, {targets}};
      };
      if (parts) {
        EXPECT_TRUE(engine.train_batch(next).outcome.applied());
      } else {
        const std::string error = error_of([&] { engine.train_batch(next); });
        EXPECT_NE(error.find("the micro-batches of stages 0 and 1 differ"), std::string::npos) << error;
      }
    });
  }
}

TEST(Pipeline, AModelAsItIsIsNotCutInCpp) {
  run_ranks(1, [](const World& world) {
    TinyModel model = make_tiny();
    const auto error =
        error_of([&] { engine_of(*model, world, config_of(0).with(R"({"parallel": {"pipeline": 2}})")); });
    EXPECT_NE(error.find("make a PipelineModule"), std::string::npos) << error;
  });
}

TEST(PipelinePartition, CutsAsDeepSpeedDoes) {
  EXPECT_EQ(uniform_bounds(7, 3), (std::vector<int64_t>{0, 3, 5, 7}));
  EXPECT_EQ(balanced_bounds({1, 1, 1, 1, 4}, 2), (std::vector<int64_t>{0, 4, 5}));
  EXPECT_EQ(balanced_bounds({0, 4, 1, 1, 1, 1, 0}, 2), (std::vector<int64_t>{0, 2, 7}));
  EXPECT_EQ(balanced_bounds({1, 2}, 3), (std::vector<int64_t>{0, 1, 2, 2}));
}

}  // namespace
}  // namespace deeptide::listed
