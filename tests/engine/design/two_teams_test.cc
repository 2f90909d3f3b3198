// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two teams in one engine, on a mesh of 2 x 2: a unit that is sharded over fewer ranks than it is reduced over, and one
// that a part of the ranks has alone.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "engine/design/topology.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide::two_teams {
namespace {

using at::Tensor;
using world::Axis;

constexpr int kRanks = 4;
constexpr int kSteps = 4;
constexpr int64_t kMicro = 2;

/// Both experts, as every rank of plain data parallelism has them. Rank r uses expert r % 2.
struct BothImpl : torch::nn::Module {
  BothImpl() : embed(kVocabulary, kWidth), head(kWidth, kVocabulary) {
    register_module("embed", embed);
    register_module("dense", dense);
    register_module("first", experts[0]);
    register_module("second", experts[1]);
    register_module("head", head);
  }
  torch::nn::Embedding embed;
  Block dense;
  Block experts[2];
  torch::nn::Linear head;
  Tensor loss(const Tensor& tokens, const Tensor& targets, int expert) {
    const Tensor x = experts[expert](dense(embed(tokens)));
    return torch::nn::functional::cross_entropy(head(x).to(torch::kFloat), targets);
  }
};
TORCH_MODULE(Both);

/// The part of the model that a rank of the mesh has.
struct OneImpl : torch::nn::Module {
  OneImpl(Both both, int expert) {
    register_module("embed", both->embed);
    register_module("dense", both->dense);
    register_module("expert", both->experts[expert]);
    register_module("head", both->head);
  }
};
TORCH_MODULE(One);

Both make_both() {
  return make_seeded([] { return Both(); });
}

std::shared_ptr<const engine::Axes> grid() {
  engine::Axes axes;
  axes.sizes[static_cast<size_t>(Axis::data)] = axes.sizes[static_cast<size_t>(Axis::expert)] = 2;
  axes.tenancies = {{"dense.", {Axis::expert}, {Axis::data, Axis::expert}}, {"expert.", {Axis::data}, {Axis::data}}};
  return std::make_shared<const engine::Axes>(axes);
}

/// Clipping would divide by a norm whose last bits depend on how shards are cut.
Config config_at(int stage, const std::string& optimizer = "AdamW") {
  const std::string changes =
      R"({"gradient_clipping": 0.0, "optimizer": {"type": ")" + optimizer + R"(", "params": {"lr": 0.01}}})";
  return config_of(stage, kMicro, 1, false, Ranks::apart).with(changes);
}

Tensor loss_of(Both& model, const World& world, int step) {
  const auto [tokens, targets] = batch_of(step, kMicro * kRanks);
  const int64_t first = kMicro * world.rank;
  return model->loss(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro), world.rank % 2);
}

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, Tensor> weights;  // by the names of Both
};

Trained train(const World& world, const Config& config, bool on_grid) {
  Both model = make_both();
  const int expert = world.rank % 2;
  One one(model, expert);
  InitOptions options;
  options.world = world;
  if (on_grid) options.axes = grid();
  torch::nn::Module& given = on_grid ? static_cast<torch::nn::Module&>(*one) : *model;
  Engine engine = initialize(given, config, options);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor loss = loss_of(model, world, step);
    engine.backward(loss);
    const StepOutcome outcome = engine.step();
    EXPECT_TRUE(outcome.applied()) << outcome.reason;
    trained.losses.push_back(loss.item<double>());
    trained.norms.push_back(outcome.grad_norm);
  }
  for (const auto& item : given.named_parameters()) {
    std::string name = item.key();
    if (name.starts_with("expert.")) name.replace(0, 6, expert == 0 ? "first" : "second");
    trained.weights[name] = engine.full_state(item.key(), "master");
  }
  return trained;
}

std::vector<Trained> train_all(const Config& config, bool on_grid) {
  std::vector<Trained> ranks(kRanks);
  run_ranks(kRanks, [&](const World& world) { ranks[world.rank] = train(world, config, on_grid); });
  return ranks;
}

TEST(TwoTeams, TrainAsPlainDataParallelismDoesBitForBit) {
  const std::vector<Trained> plain = train_all(config_at(0), /*on_grid=*/false);
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const std::vector<Trained> on_grid = train_all(config_at(stage), /*on_grid=*/true);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(on_grid[rank].losses, plain[rank].losses);
      // The same squares, added in another order in fp64.
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(on_grid[rank].norms[step], plain[rank].norms[step], 1e-12 * plain[rank].norms[step]);
      }
      EXPECT_EQ(on_grid[rank].weights.count(rank % 2 == 0 ? "first.up.weight" : "second.up.weight"), 1U);
      for (const auto& [name, weight] : on_grid[rank].weights) {
        EXPECT_TRUE(torch::equal(weight, plain[rank].weights.at(name))) << name << " of rank " << rank;
      }
    }
  }
}

/// Norms of an expert are of what its ranks have, and matrices are gathered from these.
TEST(TwoTeams, StepWholeParametersOfTheTeamThatHasThem) {
  for (const std::string optimizer : {"Lamb", "Muon"}) {
    const std::vector<Trained> plain = train_all(config_at(0, optimizer), /*on_grid=*/false);
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(optimizer + " at stage " + std::to_string(stage));
      const std::vector<Trained> on_grid = train_all(config_at(stage, optimizer), /*on_grid=*/true);
      for (int rank = 0; rank < kRanks; ++rank) {
        for (const auto& [name, weight] : on_grid[rank].weights) {
          const Tensor& expected = plain[rank].weights.at(name);
          // Squares of other slices are added in another order, in fp64.
          const bool same = optimizer == "Muon" ? torch::equal(weight, expected)
                                                : torch::allclose(weight, expected, /*rtol=*/1e-5, /*atol=*/1e-7);
          EXPECT_TRUE(same) << name << " of rank " << rank;
        }
      }
    }
  }
}

/// The row of a reduction over ranks 1 and 3 is no rank of the job.
TEST(TwoTeams, NameTheRankOfTheJobWhoseGradientIsBad) {
  for (const bool in_expert : {true, false}) {
    run_ranks(kRanks, [&](const World& world) {
      Both model = make_both();
      One one(model, world.rank % 2);
      InitOptions options;
      options.world = world;
      options.axes = grid();
      Engine engine = initialize(*one, config_at(2), options);
      const Tensor weight = (in_expert ? model->experts[world.rank % 2] : model->dense)->up->weight;
      if (world.rank == 3) weight.register_hook([](const Tensor& gradient) { return gradient * NAN; });
      engine.backward(loss_of(model, world, 0));
      const StepOutcome outcome = engine.step();
      EXPECT_EQ(outcome.result, StepResult::non_finite);
      EXPECT_EQ(outcome.parameter, in_expert ? "expert.up.weight" : "dense.up.weight");
      EXPECT_EQ(outcome.rank, 3);
      EXPECT_EQ(outcome.phase, "backward");
    });
  }
}

TEST(TwoTeams, RefuseWhatDoesNotKnowThem) {
  run_ranks(kRanks, [](const World& world) {
    Both model = make_both();
    One one(model, world.rank % 2);
    InitOptions options;
    options.world = world;
    options.axes = grid();
    const std::string error = error_of([&] { initialize(*one, config_at(0, "OneBitAdam"), options); });
    EXPECT_NE(error.find("axes of their own do not go with OneBitAdam"), std::string::npos);
  });
}

}  // namespace
}  // namespace deeptide::two_teams
