// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two stages of a model beside two data ranks, in C++: the bits of the uncut model, and its checkpoints.
#include "deeptide/pipeline_stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "checkpoint/scratch.h"
#include "engine/models.h"
#include "errors.h"
#include "on_hosts.h"
#include "ranks.h"

namespace deeptide::pipeline {
namespace {

using at::Tensor;

constexpr int kStages = 2, kData = 2, kSteps = 3;
constexpr int64_t kMicro = 2, kAccumulation = 2;

struct WholeImpl : torch::nn::Module {
  WholeImpl() : embed(kVocabulary, kWidth), head(kWidth, kVocabulary) {
    register_module("embed", embed);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }
  Tensor front(const Tensor& tokens) { return first(embed(tokens)); }
  Tensor back(const Tensor& x, const Tensor& targets) {
    return torch::nn::functional::cross_entropy(head(second(x)).to(torch::kFloat), targets);
  }
  torch::nn::Embedding embed;
  Block first, second;
  torch::nn::Linear head;
};
TORCH_MODULE(Whole);

/// One stage's part of the model.
struct PartImpl : torch::nn::Module {
  PartImpl(Whole whole, int stage) {
    if (stage == 0) {
      register_module("embed", whole->embed);
      register_module("first", whole->first);
    } else {
      register_module("second", whole->second);
      register_module("head", whole->head);
    }
  }
};
TORCH_MODULE(Part);

Whole make_whole() {
  return make_seeded([] { return Whole(); });
}

Config config_at(int stage) {
  return config_of(stage, kMicro, kAccumulation, false, Ranks::apart).with(R"({"gradient_clipping": 0.0})");
}

std::pair<Tensor, Tensor> micro_batch(int step, int64_t micro, int data_rank) {
  const auto [tokens, targets] = batch_of(step, kMicro * kAccumulation * kData);
  const int64_t first = (micro * kData + data_rank) * kMicro;
  return {tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro)};
}

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, Tensor> weights;
};

void note_weights(torch::nn::Module& model, Engine& engine, Trained& trained) {
  for (const auto& item : model.named_parameters()) {
    trained.weights[item.key()] = engine.full_state(item.key(), "master");
  }
}

Trained train_whole(const World& world, int zero_stage) {
  Whole model = make_whole();
  Engine engine = engine_of(*model, world, config_at(zero_stage));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    StepOutcome outcome;
    for (int64_t micro = 0; micro < kAccumulation; ++micro) {
      const auto [tokens, targets] = micro_batch(step, micro, world.rank);
      const Tensor loss = model->back(model->front(tokens), targets);
      trained.losses.push_back(loss.item<double>());
      engine.backward(loss);
      outcome = engine.step();
    }
    trained.norms.push_back(outcome.grad_norm);
  }
  note_weights(*model, engine, trained);
  return trained;
}

Engine engine_of_stage(Part& part, const World& world, const Config& config) {
  InitOptions options;
  options.world = world;
  options.axes = pipeline_axes(kStages, world.size);
  return initialize(*part, config, options);
}

StepOutcome run_first(Whole& model, Engine& engine, int step) {
  PipelineStage stage(engine);
  StepOutcome outcome;
  for (int64_t micro = 0; micro < kAccumulation; ++micro) {
    const Tensor out = model->front(micro_batch(step, micro, stage.data_rank()).first);
    stage.send(out.detach(), 1);
    const Tensor gradient = stage.receive(stage.expect(at::empty_like(out.detach()), 1));
    stage.backward({out}, {gradient});
    outcome = engine.step();
  }
  return outcome;
}

StepOutcome run_second(Whole& model, Engine& engine, int step, std::vector<double>& losses) {
  PipelineStage stage(engine);
  StepOutcome outcome;
  for (int64_t micro = 0; micro < kAccumulation; ++micro) {
    const Tensor in = stage.receive(stage.expect(at::empty({kMicro, kWidth}), 0)).requires_grad_();
    const Tensor loss = model->back(in, micro_batch(step, micro, stage.data_rank()).second);
    losses.push_back(loss.item<double>());
    engine.backward(loss);
    stage.send(in.grad(), 0);
    outcome = engine.step();
  }
  return outcome;
}

/// The same, but gradients of all micro-batches wait until the last of them is there.
StepOutcome run_second_late(Whole& model, Engine& engine, int step, std::vector<double>& losses) {
  PipelineStage stage(engine);
  for (int64_t micro = 0; micro < kAccumulation; ++micro) {
    const Tensor in = stage.receive(stage.expect(at::empty({kMicro, kWidth}), 0)).requires_grad_();
    const Tensor loss = model->back(in, micro_batch(step, micro, stage.data_rank()).second);
    losses.push_back(loss.item<double>());
    stage.hold(micro);
    engine.backward(loss);
    stage.hold(std::nullopt);
    stage.send(in.grad(), 0);
  }
  StepOutcome outcome;
  for (int64_t micro = 0; micro < kAccumulation; ++micro) {
    stage.give(micro);
    outcome = engine.step();
  }
  return outcome;
}

using RunSecond = decltype(run_second);

Trained train_stage(const World& world, int zero_stage, RunSecond& second) {
  Whole model = make_whole();
  const int index = world.rank / kData;
  Part part(model, index);
  Engine engine = engine_of_stage(part, world, config_at(zero_stage));
  PipelineStage stage(engine);
  EXPECT_EQ(stage.index(), index);
  EXPECT_EQ(stage.num_stages(), kStages);
  EXPECT_EQ(stage.data_rank(), world.rank % kData);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const StepOutcome outcome =
        index == 0 ? run_first(model, engine, step) : second(model, engine, step, trained.losses);
    EXPECT_TRUE(outcome.applied()) << outcome.reason;
    trained.norms.push_back(outcome.grad_norm);
  }
  stage.flush();
  EXPECT_EQ(stage.exchange({1.0 * index, 5.0}), (std::vector<double>{0.0, 5.0, 1.0, 5.0}));
  note_weights(*part, engine, trained);
  return trained;
}

void expect_trained_as_uncut(RunSecond& second) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(zero_stage));
    std::vector<Trained> whole(kData), cut(kStages * kData);
    run_ranks(kData, [&](const World& world) { whole[world.rank] = train_whole(world, zero_stage); });
    run_ranks(kStages * kData, [&](const World& world) { cut[world.rank] = train_stage(world, zero_stage, second); });
    size_t num_weights = 0;
    for (int rank = 0; rank < kStages * kData; ++rank) {
      const Trained& wanted = whole[rank % kData];
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(cut[rank].norms[step], wanted.norms[step], 1e-12 * wanted.norms[step]);
      }
      EXPECT_EQ(cut[rank].losses, rank < kData ? std::vector<double>() : wanted.losses);
      for (const auto& [name, weight] : cut[rank].weights) {
        EXPECT_TRUE(torch::equal(weight, wanted.weights.at(name))) << name;
      }
      if (rank % kData == 0) num_weights += cut[rank].weights.size();
    }
    EXPECT_EQ(num_weights, whole[0].weights.size());
  }
}

TEST(PipelineStage, TrainsAsTheUncutModelDoesBitForBit) { expect_trained_as_uncut(run_second); }

TEST(PipelineStage, GradientsThatWaitEnterTheSumsInTheirOrder) { expect_trained_as_uncut(run_second_late); }

/// One micro-batch's gradients wait `times` times under one number, and are given once, in each half of a step.
double norm_after(const World& world, int times) {
  Whole model = make_whole();
  Part part(model, world.rank / kData);
  Engine engine = engine_of_stage(part, world, config_at(1));
  PipelineStage stage(engine);
  const auto [tokens, targets] = micro_batch(0, 0, stage.data_rank());
  const auto wait = [&, &tokens = tokens, &targets = targets] {
    stage.hold(7);
    engine.backward(stage.index() == 0 ? model->front(tokens).sum() : model->back(at::ones({kMicro, kWidth}), targets));
    stage.hold(std::nullopt);
  };
  wait();
  engine.zero_grad();
  stage.give(7);
  EXPECT_NE(error_of([&] { engine.step(); }).find("no rank has a gradient"), std::string::npos);
  StepOutcome outcome;
  for (int64_t micro = 0; micro < kAccumulation; ++micro) {
    for (int i = 0; i < times; ++i) wait();
    stage.give(7);
    stage.give(8);  // nothing waits
    outcome = engine.step();
  }
  return outcome.grad_norm;
}

TEST(PipelineStage, GradientsThatWaitAreDroppedAndBegunAnew) {
  run_ranks(kStages * kData, [](const World& world) {
    const double once = norm_after(world, 1);
    EXPECT_GT(once, 0.0);
    EXPECT_EQ(norm_after(world, 2), once);
  });
}

TEST(PipelineStage, StepsWithoutAGradientWhereABackwardHasPassed) {
  run_ranks(kStages * kData, [](const World& world) {
    Whole model = make_whole();
    Part part(model, world.rank / kData);
    Engine engine = engine_of_stage(part, world, config_at(1));
    PipelineStage stage(engine);
    const Tensor before = part->parameters().front().clone();
    for (int64_t micro = 0; micro < kAccumulation; ++micro) {
      stage.note_backward();
      engine.step();
      EXPECT_NE(error_of([&] { engine.step(); }).find("no rank has a gradient"), std::string::npos);
    }
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_TRUE(torch::equal(part->parameters().front(), before));
  });
}

using States = std::map<std::string, Tensor>;

/// Masters and moments by name and role, whole.
States states_of(const torch::nn::Module& model, Engine& engine) {
  States states;
  for (const auto& item : model.named_parameters()) {
    for (const char* role : {"master", "exp_avg", "exp_avg_sq"}) {
      states[item.key() + "/" + role] = engine.full_state(item.key(), role);
    }
  }
  return states;
}

void expect_equal_states(const States& found, const States& wanted) {
  EXPECT_FALSE(found.empty());
  for (const auto& [name, state] : found) EXPECT_TRUE(torch::equal(state, wanted.at(name))) << name;
}

/// A rank of a stage. `data`: ranks per stage.
struct StageRank {
  StageRank(const World& world, const Config& config, int data = kData)
      : index(world.rank / data), engine(engine_of_stage(part, world, config)) {}
  StepOutcome step(int number) {
    std::vector<double> losses;
    const StepOutcome outcome =
        index == 0 ? run_first(model, engine, number) : run_second(model, engine, number, losses);
    PipelineStage(engine).flush();
    return outcome;
  }
  int index;
  Whole model = make_whole();
  Part part{model, index};
  Engine engine;
};

/// Trains a step and saves it; returns the states of all stages.
States save_of_stages(const std::vector<int>& hosts, const Config& config, bool blocking,
                      const std::function<std::string(int)>& folder) {
  States saved;
  std::mutex mutex;
  run_on_hosts(hosts, [&](const World& world) {
    StageRank rank(world, config);
    rank.step(0);
    States own = states_of(*rank.part, rank.engine);
    rank.engine.save_checkpoint(folder(world.rank), "t", "{}", {.blocking = blocking});
    StepOutcome outcome;
    for (int step = 1; !blocking && outcome.saved.empty(); ++step) {
      ASSERT_EQ(outcome.save_error, "");
      outcome = rank.step(step);
    }
    EXPECT_EQ(outcome.saved, blocking ? "" : folder(world.rank) + "/t");
    const std::lock_guard lock(mutex);
    saved.merge(own);
  });
  return saved;
}

TEST(PipelineStage, SavesBesideTraining) {
  for (const int zero_stage : {1, 3}) {
    const checkpoint::Scratch scratch;
    const Config config = config_at(zero_stage);
    const auto folder = [&](int) { return scratch.path(); };
    const States saved = save_of_stages({0, 0, 0, 0}, config, /*blocking=*/false, folder);
    run_ranks(kStages * kData, [&](const World& world) {
      StageRank rank(world, config);
      ASSERT_TRUE(rank.engine.load_checkpoint(scratch.path()));
      expect_equal_states(states_of(*rank.part, rank.engine), saved);
      rank.engine.save_checkpoint(scratch.path(), "waited for", "{}", {.blocking = false});
      EXPECT_EQ(rank.engine.wait_for_save(), scratch / "waited for");
    });
  }
}

TEST(PipelineStage, SavesOnHostsWithFoldersOfTheirOwn) {
  for (const bool blocking : {true, false}) {
    const checkpoint::Scratch scratch;
    const Config config = config_at(blocking ? 3 : 1).with(R"({"checkpoint": {"use_node_local_storage": true}})");
    // Each stage is on both hosts; then each has a host of its own; then the model is uncut, on hosts that changed.
    const std::vector<int> hosts{0, 1, 0, 1}, others{1, 1, 0, 2}, uncut{1, 0};
    const auto folder_of = [&](const std::vector<int>& of_ranks) {
      return [&, of_ranks](int rank) { return scratch / std::to_string(of_ranks[rank]); };
    };
    const States saved = save_of_stages(hosts, config, blocking, folder_of(hosts));
    EXPECT_TRUE(checkpoint::exists(scratch / "1/t/rank_00003.safetensors"));
    EXPECT_FALSE(checkpoint::exists(scratch / "1/t/rank_00002.safetensors"));
    run_on_hosts(others, [&](const World& world) {
      StageRank rank(world, config);
      ASSERT_TRUE(rank.engine.load_checkpoint(folder_of(others)(world.rank)));
      expect_equal_states(states_of(*rank.part, rank.engine), saved);
    });
    run_on_hosts(uncut, [&](const World& world) {
      Whole model = make_whole();
      Engine engine = engine_of(*model, world, config);
      ASSERT_TRUE(engine.load_checkpoint(folder_of(uncut)(world.rank)));
      expect_equal_states(states_of(*model, engine), saved);
    });
  }
}

// Ranks divide the blocks of each tensor among those that want it. By world ranks, some fell to other stages' ranks.
// An engine that has state of worth compares before it reads; another finds the same damage as it reads.
TEST(PipelineStage, LoadsNothingOfADamagedCheckpoint) {
  constexpr int kThree = 3;  // so that no rank reads half of a block
  const checkpoint::Scratch scratch;
  const Config config = config_at(1);
  run_ranks(kStages * kThree, [&](const World& world) {
    StageRank rank(world, config, kThree);
    for (const char* tag : {"t", "whole"}) rank.engine.save_checkpoint(scratch.path(), tag);
  });
  for (int shard = 0; shard < kStages * kThree; ++shard) {
    const std::string path = scratch / ("t/rank_0000" + std::to_string(shard) + ".safetensors");
    const auto flip = [&] {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(-1, std::ios::end);
      const int last = file.get();
      file.seekp(-1, std::ios::end);
      file.put(static_cast<char>(last ^ 1));
    };
    flip();
    std::vector<std::string> at_first(kStages * kThree), errors(kStages * kThree);
    run_ranks(kStages * kThree, [&](const World& world) {
      StageRank rank(world, config, kThree);
      at_first[world.rank] = error_of([&] { rank.engine.load_checkpoint(scratch.path(), "t"); });
      rank.engine.load_checkpoint(scratch.path(), "whole");
      errors[world.rank] = error_of([&] { rank.engine.load_checkpoint(scratch.path(), "t"); });
    });
    flip();
    const auto names_it = [&](const std::string& error) { return error.find(path) != std::string::npos; };
    EXPECT_GE(std::count_if(at_first.begin(), at_first.end(), names_it), 1) << path;
    EXPECT_GE(std::count_if(errors.begin(), errors.end(), names_it), 1) << path;
    for (const std::string& error : errors) EXPECT_EQ(error.find("was replaced"), std::string::npos) << error;
  }
}

TEST(PipelineStage, RefusesMeshesThatCannotBe) {
  EXPECT_NE(error_of([] { pipeline_axes(4, 6); }).find("with 6 ranks take 3 or 6 stages"), std::string::npos);
  EXPECT_NE(error_of([] { pipeline_axes(7, 6); }).find("with 6 ranks take 6 stages"), std::string::npos);
  run_ranks(1, [](const World& world) {
    Whole model = make_whole();
    Engine engine = engine_of(*model, world, config_at(0));
    EXPECT_NE(error_of([&] { PipelineStage{engine}; }).find("the engine has no stages"), std::string::npos);
  });
}

TEST(PipelineStage, TakesALetterOnce) {
  run_ranks(2, [](const World& world) {
    Whole model = make_whole();
    Part part(model, world.rank);
    Engine engine = engine_of_stage(part, world, config_at(0));
    PipelineStage stage(engine);
    if (world.rank == 0) {
      stage.send(at::ones({3}), 1);
      stage.flush();
    } else {
      const int64_t letter = stage.expect(at::empty({3}), 0);
      EXPECT_TRUE(stage.receive(letter).equal(at::ones({3})));
      EXPECT_NE(error_of([&] { stage.receive(letter); }).find("each is taken once"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace deeptide::pipeline
