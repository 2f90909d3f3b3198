// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// torch's C++ optimizers as the program's own: equal to plain torch, equal at every stage, saved and read elsewhere.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "deeptide/engine.h"
#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

using OptimizerPointer = std::shared_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<OptimizerPointer(std::vector<at::Tensor>)>;

struct OwnOptimizer {
  const char* name;
  MakeOptimizer make;
};

std::vector<OwnOptimizer> own_optimizers() {
  using namespace torch::optim;
  return {{"Adam", [](auto p) { return std::make_shared<Adam>(p, AdamOptions(0.01).eps(1e-5).amsgrad(true)); }},
          {"AdamW", [](auto p) { return std::make_shared<AdamW>(p, AdamWOptions(0.01).eps(1e-5)); }},
          {"SGD", [](auto p) { return std::make_shared<SGD>(p, SGDOptions(0.1).momentum(0.9)); }},
          {"plain SGD", [](auto p) { return std::make_shared<SGD>(p, SGDOptions(0.1)); }},
          {"RMSprop", [](auto p) { return std::make_shared<RMSprop>(p, RMSpropOptions(0.01).eps(1e-2)); }},
          {"Adagrad", [](auto p) { return std::make_shared<Adagrad>(p, AdagradOptions(0.01)); }}};
}

Config unclipped_config(int stage) { return config_of(stage).with(R"({"gradient_clipping": 0})"); }

struct OwnRun {
  TinyModel model;
  OptimizerPointer optimizer;
  Engine engine;

  OwnRun(const World& world, int stage, const MakeOptimizer& make)
      : model(make_tiny()), optimizer(make(model->parameters())), engine([&] {
          InitOptions options;
          options.world = world;
          return initialize(*model, unclipped_config(stage), with_optimizer(*model, optimizer, options));
        }()) {}

  void train(int first, int last) {
    const World& world = engine.world();
    for (int step = first; step < last; ++step) {
      const auto [tokens, targets] = batch_of(step, 2L * world.size);
      engine.backward(model(tokens.narrow(0, 2L * world.rank, 2), targets.narrow(0, 2L * world.rank, 2)));
      ASSERT_TRUE(engine.step().applied());
    }
  }

  std::vector<at::Tensor> masters() {
    std::vector<at::Tensor> values;
    for (const auto& item : model->named_parameters()) values.push_back(engine.full_state(item.key(), "master"));
    return values;
  }
};

void expect_same_bits(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other,
                      const std::string& what) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_TRUE(one[i].equal(other[i])) << what << ", parameter " << i << ", off by "
                                        << (one[i] - other[i]).abs().max().item<double>();
}

TEST(OwnOptimizers, ComputeWhatPlainTorchDoes) {
  for (const OwnOptimizer& c : own_optimizers()) {
    run_ranks(1, [&](const World& world) {  // both on one thread: sums depend on their number
      TinyModel model = make_tiny();
      auto parameters = model->parameters();
      parameters.pop_back();  // the head's, tied to the embedding: plain torch would step it twice
      const auto optimizer = c.make(parameters);
      for (int step = 0; step < 5; ++step) {
        const auto [tokens, targets] = batch_of(step, 2);
        model(tokens, targets).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      std::vector<at::Tensor> expected;
      for (const auto& item : model->named_parameters()) expected.push_back(item.value().detach());
      OwnRun run(world, 3, c.make);
      run.train(0, 5);
      expect_same_bits(run.masters(), expected, c.name);
    });
  }
}

TEST(OwnOptimizers, AgreeAtAllStagesAndResumeInAnyOfThem) {
  for (const OwnOptimizer& c : own_optimizers()) {
    const auto folder = std::filesystem::temp_directory_path() /
                        ("own_optimizers_" + std::to_string(::getpid()) + "_" + std::string(c.name));
    std::vector<at::Tensor> straight;
    for (const int stage : {0, 1, 2, 3}) {
      run_ranks(2, [&](const World& world) {
        OwnRun trained(world, stage, c.make);
        trained.train(0, 2);
        if (stage == 2) trained.engine.save_checkpoint(folder.string());
        trained.train(2, 4);
        const auto masters = trained.masters();
        if (world.rank != 0) return;
        if (stage == 0) {
          straight = masters;
        } else {
          expect_same_bits(masters, straight, std::string(c.name) + ", stage " + std::to_string(stage));
        }
      });
    }
    run_ranks(2, [&](const World& world) {
      OwnRun resumed(world, 3, c.make);
      ASSERT_TRUE(resumed.engine.load_checkpoint(folder.string()));
      resumed.train(2, 4);
      expect_same_bits(resumed.masters(), straight, std::string(c.name) + ", resumed");
    });
    run_ranks(3, [&](const World& world) {
      OwnRun other(world, 1, c.make);
      ASSERT_TRUE(other.engine.load_checkpoint(folder.string()));
      other.train(2, 3);
    });
    std::filesystem::remove_all(folder);
  }
}

TEST(OwnOptimizers, FollowALearningRateThatTheProgramChanges) {
  run_ranks(2, [](const World& world) {
    OwnRun trained(world, 2, own_optimizers()[3].make);
    trained.train(0, 1);
    for (auto& group : trained.optimizer->param_groups()) group.options().set_lr(0.0);
    const auto before = trained.masters();
    trained.train(1, 2);
    expect_same_bits(trained.masters(), before, "a rate of 0");
    EXPECT_EQ(trained.engine.hyperparameters(0).lr(), 0.0);
  });
}

struct Stranger : torch::optim::Optimizer {
  explicit Stranger(const std::vector<at::Tensor>& p)
      : Optimizer({torch::optim::OptimizerParamGroup(p)}, std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (auto& group : param_groups()) {
      for (auto& p : group.params()) {
        if (p.grad().defined()) p.data().sub_(p.grad(), group.options().get_lr());
      }
    }
    return {};
  }
};

TEST(OwnOptimizers, AreRefusedOnShardsUntilTheProgramSaysThatTheyAreElementwise) {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    const auto stranger = std::make_shared<Stranger>(model->parameters());
    InitOptions options;
    options.world = world;
    try {
      initialize(*model, unclipped_config(2), with_optimizer(*model, stranger, options));
      ADD_FAILURE() << "accepted";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("not known to step each element by itself"), std::string::npos);
    }
  });
  std::vector<at::Tensor> expected;
  run_ranks(2, [&](const World& world) {
    OwnRun plain(world, 2, own_optimizers()[3].make);
    plain.train(0, 2);
    const auto masters = plain.masters();
    if (world.rank == 0) expected = masters;
  });
  run_ranks(2, [&](const World& world) {
    TinyModel model = make_tiny();
    InitOptions options;
    options.world = world;
    options = with_optimizer(*model, std::make_shared<Stranger>(model->parameters()), options, /*elementwise=*/true);
    Engine engine = initialize(*model, unclipped_config(2), options);
    for (int step = 0; step < 2; ++step) {
      const auto [tokens, targets] = batch_of(step, 4);
      engine.backward(model(tokens.narrow(0, 2L * world.rank, 2), targets.narrow(0, 2L * world.rank, 2)));
      ASSERT_TRUE(engine.step().applied());
    }
    size_t i = 0;
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(engine.full_state(item.key(), "master").equal(expected[i++])) << item.key();
    }
  });
}

TEST(OwnOptimizers, LbfgsIsRefused) {
  TinyModel model = make_tiny();
  EXPECT_THROW(with_optimizer(*model, std::make_shared<torch::optim::LBFGS>(model->parameters())), c10::ValueError);
}

}  // namespace
}  // namespace deeptide
