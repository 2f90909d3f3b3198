// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layers that ranks share, in C++: the numbers of the whole model, and its checkpoints.
#include <gtest/gtest.h>

#include <map>

#include "checkpoint/format/region.h"
#include "deeptide/tensor_layers.h"
#include "engine/model/slices.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"
#include "sharding/tensor_slices.h"

namespace deeptide::tensor {
namespace {

using at::Tensor;
using checkpoint::Piece;
using checkpoint::Region;
using world::Axis;

constexpr int kTeam = 2, kData = 2, kSteps = 3;
constexpr int64_t kMicro = 2;

/// A model whose MLP a team shares; without a team, the whole one.
struct SharedImpl : torch::nn::Module {
  SharedImpl() : embed(kVocabulary, kWidth), head(kWidth, kVocabulary) {
    register_module("embed", embed);
    register_module("block", block);
    register_module("head", head);
  }
  void share(const TensorTeamPtr& team) {
    up = block->replace_module("up", ColumnParallelLinear(block->up, team));
    down = block->replace_module("down", RowParallelLinear(block->down, team));
  }
  Tensor loss(const Tensor& tokens, const Tensor& targets) {
    const Tensor x = embed(tokens), normed = block->norm(x);
    const Tensor change = up ? down(torch::gelu(up(normed))) : block->down(torch::gelu(block->up(normed)));
    return torch::nn::functional::cross_entropy(head(x + change).to(torch::kFloat), targets);
  }
  torch::nn::Embedding embed;
  Block block;
  torch::nn::Linear head;
  ColumnParallelLinear up = nullptr;
  RowParallelLinear down = nullptr;
};
TORCH_MODULE(Shared);

Config config_at(int stage) { return config_of(stage, kMicro, 1, false, Ranks::apart); }

struct MeshTraining {
  MeshTraining(const World& world, int stage, int size)
      : team(std::make_shared<TensorTeam>(world, size, 60.0)), model(make_seeded([] { return Shared(); })) {
    InitOptions options;
    options.world = world;
    if (size > 1) {
      model->share(team);
      options.axes = tensor_axes({.tensor = size}, world.size, tensor_slices(*model), {}, team);
    }
    engine.emplace(initialize(*model, config_at(stage), options));
  }
  void train() {
    for (int step = 0; step < kSteps; ++step) {
      const auto [tokens, targets] = batch_of(step, kMicro * team->data_size());
      const int64_t first = kMicro * team->data_rank();
      const Tensor loss = model->loss(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro));
      losses.push_back(loss.item<double>());
      engine->backward(loss);
      const StepOutcome outcome = engine->step();
      EXPECT_TRUE(outcome.applied()) << outcome.reason;
      norms.push_back(outcome.grad_norm);
    }
  }
  std::map<std::string, Tensor> weights() {
    std::map<std::string, Tensor> found;
    for (const NamedTensor& tensor : engine->module_state_dict()) found[tensor.name] = tensor.tensor;
    return found;
  }

  std::shared_ptr<TensorTeam> team;
  Shared model;
  std::optional<Engine> engine;
  std::vector<double> losses, norms;
};

void expect_near(const std::vector<double>& one, const std::vector<double>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], other[i], 1e-5 * other[i]);
}

TEST(TensorTeams, HaveSeveralSumsUnderWay) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    run_ranks(ranks, [&](const World& world) {
      TensorTeam team(world, ranks, 60.0);
      const double sum = ranks * (ranks + 1) / 2.0;
      const Tensor own = at::full({7}, world.rank + 1), rows = own.expand({ranks, 7}).contiguous();
      const Tensor large = at::full({30'000}, world.rank + 1, at::kFloat);  // more than a rank sums whole
      TensorTeam::Sum first = team.start_all_reduce(large, "backward"),
                      second = team.start_reduce_scatter(rows, "backward"),
                      third = team.start_all_reduce(own, "backward");
      EXPECT_TRUE(at::equal(first.wait(), at::full_like(large, sum)));
      EXPECT_TRUE(at::equal(team.all_reduce(own, "backward"), at::full_like(own, sum)));
      EXPECT_TRUE(at::equal(second.wait(), at::full_like(own, sum)));
      EXPECT_TRUE(at::equal(third.wait(), at::full_like(own, sum)));
    });
  }
}

TEST(TensorTeams, TrainAsTheWholeModel) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    std::vector<std::unique_ptr<MeshTraining>> whole(kData);
    std::vector<std::map<std::string, Tensor>> expected(kData);
    run_ranks(kData, [&](const World& world) {
      whole[world.rank] = std::make_unique<MeshTraining>(world, stage, 1);
      whole[world.rank]->train();
      expected[world.rank] = whole[world.rank]->weights();
      whole[world.rank]->engine.reset();
    });
    run_ranks(kData * kTeam, [&](const World& world) {
      MeshTraining run(world, stage, kTeam);
      run.train();
      expect_near(run.losses, whole[run.team->data_rank()]->losses);
      expect_near(run.norms, whole[0]->norms);
      for (const auto& [name, value] : run.weights()) {
        // Steps of AdamW at a learning rate of 1e-2: a hundredth of their way.
        EXPECT_LT((value - expected[0].at(name)).abs().max().item<double>(), 3e-4) << name;
      }
    });
  }
}

TEST(TensorTeams, RefuseImpossibleMeshesWithTheNearest) {
  const auto refusal = [](const MeshSizes& sizes, int ranks) { return error_of([&] { check_mesh(sizes, ranks); }); };
  EXPECT_EQ(refusal({.pipeline = 2, .tensor = 2}, 8), "none");
  EXPECT_EQ(refusal({.tensor = 2, .data = 4}, 8), "none");
  EXPECT_NE(refusal({.pipeline = 3}, 8).find("take parallel.pipeline 2 or 4"), std::string::npos);
  EXPECT_NE(refusal({.pipeline = 2, .tensor = 3}, 8)
                .find("4 ranks of each stage do not divide into teams of 3; take "
                      "parallel.tensor 2 or 4"),
            std::string::npos);
  EXPECT_NE(refusal({.tensor = 16}, 8).find("take parallel.tensor 8"), std::string::npos);
  EXPECT_NE(refusal({.tensor = 2, .data = 2}, 8).find("take parallel.data 4, or \"auto\""), std::string::npos);
}

/// Copies between a piece's data and the elements of its region in `whole` (N,).
void apply(const Piece& piece, const Tensor& whole, bool saves, std::vector<int>& touched) {
  const Tensor values = at::empty({piece.region.numel()}, whole.options());
  const auto move = [&](bool to_values) {
    if (piece.data.transfer()) return piece.data.transfer()(0, values);
    to_values ? values.copy_(piece.data.tensor().view({-1})) : piece.data.tensor().view({-1}).copy_(values);
  };
  if (saves) move(true);
  const checkpoint::Runs runs(piece.shape, piece.region);
  int64_t next = 0;
  for (int64_t run = 0; run < runs.count(); ++run) {
    const Tensor there = whole.narrow(0, runs.begin(run), runs.length());
    const Tensor here = values.narrow(0, next, runs.length());
    saves ? there.copy_(here) : here.copy_(there);
    for (int64_t i = 0; i < runs.length(); ++i) ++touched[static_cast<size_t>(runs.begin(run) + i)];
    next += runs.length();
  }
  if (!saves && piece.region.numel() > 0) move(false);
}

engine::Topology topology_of(int ranks, int rank, const TensorSlice& slice) {
  engine::Topology topology;
  topology.mesh = world::Mesh(ranks, {1, 1, 1, 1, ranks});
  topology.rank = rank;
  topology.slices.emplace(slice.name, slice);
  return topology;
}

/// Every slice of every rank in shards of `step` elements: the pieces hold each element of the whole once.
void check_places(const TensorSlice& slice, const std::vector<int64_t>& local, int ranks, int64_t step) {
  const auto shape = sharding::whole_shape(slice, local);
  std::vector<int64_t> of_all = local;
  of_all.insert(of_all.begin(), ranks);
  const Tensor all =
      torch::arange(1.0, 1.0 + static_cast<double>(c10::multiply_integers(of_all)), torch::kFloat).view(of_all);
  const Tensor whole = sharding::joined(slice, all);
  Tensor found = torch::zeros({whole.numel()});
  std::vector<int> saved(static_cast<size_t>(whole.numel())), loaded = saved;
  for (int rank = 0; rank < ranks; ++rank) {
    const Tensor flat = all[rank].reshape({-1}), back = torch::zeros_like(flat);
    for (int64_t begin = 0; begin < flat.numel(); begin += step) {
      const int64_t count = std::min(step, flat.numel() - begin);
      for (const bool saves : {true, false}) {
        const Tensor data = (saves ? flat : back).narrow(0, begin, count);
        std::vector<Piece> pieces{
            {slice.name, checkpoint::Role::master(), local, Region::range(begin, begin + count), data}};
        engine::place_slices(topology_of(ranks, rank, slice), saves ? engine::Extent::owned : engine::Extent::held,
                             pieces);
        ASSERT_FALSE(pieces.empty());
        for (const Piece& piece : pieces) {
          ASSERT_EQ(piece.shape, shape);
          ASSERT_TRUE(checkpoint::fits(piece.region, shape)) << piece.region.text();
          apply(piece, saves ? found : whole.view({-1}), saves, saves ? saved : loaded);
        }
      }
    }
    EXPECT_EQ((back != 0).sum().item<int64_t>(), (back == flat).logical_and(back != 0).sum().item<int64_t>());
  }
  EXPECT_TRUE(torch::equal(found.view(shape), whole)) << slice.name;
  EXPECT_TRUE(std::all_of(saved.begin(), saved.end(), [](int times) { return times == 1; }));
  EXPECT_TRUE(std::all_of(loaded.begin(), loaded.end(), [](int times) { return times == 1; }));
}

TEST(Slices, HaveEachElementOfTheWholeOnceHoweverTheyAreSharded) {
  for (const int64_t step : {1, 3, 4, 7, 11, 100}) {
    check_places({"rows", 0, {6}}, {3, 4}, 2, step);
    check_places({"padded rows", 0, {5}}, {3, 4}, 2, step);
    check_places({"fewer rows than ranks", 0, {2}}, {1, 4}, 3, step);
    check_places({"fused rows", 0, {4, 2, 2}}, {4, 3}, 2, step);
    check_places({"bias", 0, {5}}, {2}, 3, step);
    check_places({"columns", 1, {6}}, {4, 3}, 2, step);
    check_places({"padded columns", 1, {7}}, {4, 4}, 2, step);
    check_places({"fused columns", 1, {2, 4, 2}}, {3, 4}, 2, step);
    check_places({"planes", 1, {4}}, {3, 2, 2}, 2, step);
    check_places({"experts' columns", 2, {4}}, {3, 5, 2}, 2, step);
    check_places({"fused columns of planes", 2, {2, 4}}, {2, 3, 3}, 2, step);
    check_places({"planes of planes", 2, {4}}, {3, 2, 2, 2}, 2, step);
  }
}

}  // namespace
}  // namespace deeptide::tensor
