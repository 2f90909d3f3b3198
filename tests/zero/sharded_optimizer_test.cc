// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The same step at every stage: over shards or whole units, published or left where it is.
#include "zero/sharded_optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "ranks.h"
#include "sharding/layout.h"
#include "world/failure_board.h"

namespace deeptide::zero {
namespace {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

constexpr int64_t kSizes[] = {50, 1, 33, 200};  // the first two train in group 0, the others in group 1

Tensor start_of(int p) { return at::arange(kSizes[p], at::kFloat) / 100 - 0.25 * p; }
Tensor gradient_of(int p, int step) { return at::arange(kSizes[p], at::kFloat).sin() * (step + 1); }

/// Four parameters in two units, a reducer and an optimizer over them: a stage without model or engine.
struct Stage {
  Stage(const World& world, int stage, at::ScalarType dtype, OptimizerKind kind)
      : group(world, comm::Team::whole(world), "reductions",
              {.timeout = std::chrono::seconds(60), .board = std::make_shared<world::FailureBoard>(world, "board")}),
        policy(kStages.at(stage)) {
    at::NoGradGuard no_grad;
    const auto memory = policy.shard_parameters ? sharding::UnitMemory::sharded : sharding::UnitMemory::whole;
    const auto team = comm::Team::whole(world);
    std::vector<sharding::ParameterSpec> specs;
    for (int p = 0; p < 4; ++p) specs.push_back({"p" + std::to_string(p), kSizes[p], dtype, true, p / 2});
    std::vector<Unit*> all;
    for (auto& layout : sharding::build_layout(specs, {}, {world.size, 0})) {
      std::vector<Parameter> members;
      for (const auto& slot : layout.slots) {
        Parameter p;
        p.name = specs[slot.parameter].name;
        p.tensors = {start_of(slot.parameter).to(dtype)};
        p.offset = slot.offset;
        p.numel = slot.numel;
        members.push_back(std::move(p));
      }
      const int index = static_cast<int>(units.size());
      units.push_back(std::make_unique<Unit>(index, std::move(layout), std::move(members),
                                             sharding::UnitPlacement{memory, team, team}));
      Tensor whole = device::allocate_flat(ledger, device::Role::parameters, units.back()->numel(), dtype, at::kCPU);
      units.back()->pack(whole);
      units.back()->adopt(std::move(whole), ledger);
      all.push_back(units.back().get());
    }
    const gradients::ReducerOptions options{.reduce_dtype = at::kFloat, .scale = 1.0 / world.size};
    reducer = std::make_unique<gradients::Reducer>(all, group, nullptr, ledger, at::kCPU, options);
    optimizer = std::make_unique<ShardedOptimizer>(all, kind, policy, ledger, group, at::kCPU);
  }

  int number(const Parameter& p) const { return p.name[1] - '0'; }

  void step(int count, const std::vector<Hyperparameters>& groups, double scale = 1.0) {
    for (size_t u = units.size(); u-- > 0;) {
      for (size_t i = 0; i < units[u]->parameters().size(); ++i) {
        const int p = number(units[u]->parameters()[i]);
        reducer->add(static_cast<int>(u), static_cast<int>(i), gradient_of(p, count));
      }
    }
    reducer->finish(1);
    optimizer->step(*reducer, scale, groups);
    reducer->clear_accumulated();
  }

  Tensor gathered(Tensor mine, const Unit& unit) {
    if (mine.numel() == unit.numel()) return mine;
    Tensor whole = at::empty({unit.numel()}, mine.options());
    auto pending = group.all_gather(whole, mine);
    group.wait(pending, {});
    return whole;
  }

  /// "p2/parameter", "p2/master", …: whole, by parameter. Collective.
  std::map<std::string, Tensor> state() {
    std::map<std::string, Tensor> all;
    for (size_t u = 0; u < units.size(); ++u) {
      const Unit& unit = *units[u];
      std::vector<StateTensor> tensors = optimizer->states(static_cast<int>(u));
      tensors.push_back({"parameter", unit.memory() == sharding::UnitMemory::sharded ? unit.shard() : unit.whole()});
      for (const auto& [role, data] : tensors) {
        const Tensor whole = gathered(data, unit);
        for (const Parameter& p : unit.parameters()) all[p.name + "/" + role] = p.view_of(whole).clone();
      }
    }
    return all;
  }

  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  comm::Group group;
  StagePolicy policy;
  std::vector<std::unique_ptr<Unit>> units;
  std::unique_ptr<gradients::Reducer> reducer;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

void expect_same_bits(const std::map<std::string, Tensor>& one, const std::map<std::string, Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [name, tensor] : one) EXPECT_TRUE(at::equal(tensor, other.at(name))) << name;
}

std::vector<Hyperparameters> two_groups() {
  Hyperparameters first{.lr = 0.01, .weight_decay = 0.1}, second{.lr = 0.002, .beta1 = 0.8};
  return {first, second};
}

/// AdamW in fp64, as its paper has it.
Tensor adamw(int p, int steps, const Hyperparameters& h) {
  Tensor w = start_of(p).to(at::kDouble), m = w * 0, v = w * 0;
  for (int step = 0; step < steps; ++step) {
    const Tensor g = gradient_of(p, step).to(at::kDouble);
    w = w * (1 - h.lr * h.weight_decay);
    m = m * h.beta1 + g * (1 - h.beta1);
    v = v * h.beta2 + g * g * (1 - h.beta2);
    const double c1 = 1 - std::pow(h.beta1, step + 1), c2 = 1 - std::pow(h.beta2, step + 1);
    w = w - (m / c1) / ((v / c2).sqrt() + h.eps) * h.lr;
  }
  return w;
}

class Worlds : public testing::TestWithParam<int> {};

TEST_P(Worlds, StepAlikeAtEveryStageUnderEachGroupsOwnHyperparameters) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(GetParam(), [&](const World& world) {
      std::map<std::string, Tensor> expected;
      for (int stage = 0; stage < 4; ++stage) {
        World own = world;  // each stage's channels under names of their own
        own.store = c10::make_intrusive<c10d::PrefixStore>("stage" + std::to_string(stage), world.store);
        Stage training(own, stage, dtype, OptimizerKind::adam);
        for (int step = 0; step < 3; ++step) training.step(step, two_groups());
        EXPECT_EQ(training.optimizer->steps(), 3);
        const auto state = training.state();
        if (stage == 0) expected = state;
        expect_same_bits(state, expected);
      }
      for (int p = 0; p < 4; ++p) {
        const std::string name = "p" + std::to_string(p);
        if (dtype == at::kFloat) {  // bf16 starts elsewhere
          // A step moves a weight by lr; three fp32 roundings of the weight and one of its update a step.
          EXPECT_TRUE(
              at::allclose(expected.at(name + "/master").to(at::kDouble), adamw(p, 3, two_groups()[p / 2]), 1e-6, 1e-6))
              << name;
        }
        EXPECT_TRUE(at::equal(expected.at(name + "/master").to(dtype), expected.at(name + "/parameter"))) << name;
      }
    });
  }
}

TEST_P(Worlds, GoOnFromStatesThatWereWritten) {
  run_ranks(GetParam(), [](const World& world) {
    for (int stage : {0, 2, 3}) {
      World own = world;
      own.store = c10::make_intrusive<c10d::PrefixStore>("stage" + std::to_string(stage), world.store);
      Stage training(own, stage, at::kBFloat16, OptimizerKind::sgd);
      auto groups = two_groups();
      groups[0].momentum = groups[1].momentum = 0.9;
      training.step(0, groups);
      for (size_t u = 0; u < training.units.size(); ++u) {
        for (const auto& [role, data] : training.optimizer->states(static_cast<int>(u)))
          data.fill_(role == "master" ? 0.3 : 0.0);
      }
      training.optimizer->publish_all();
      for (const auto& [name, tensor] : training.state()) {
        if (name.find("/parameter") == std::string::npos) continue;
        EXPECT_TRUE(at::equal(tensor, at::full(tensor.sizes(), 0.3f).to(at::kBFloat16))) << name << ", stage " << stage;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3));

TEST(ShardedOptimizer, FollowsParametersThatWereRewritten) {
  run_ranks(2, [](const World& world) {
    Stage training(world, 3, at::kBFloat16, OptimizerKind::adam);
    auto groups = two_groups();
    groups[0].lr = groups[1].lr = 0.0;
    Unit& unit = *training.units[0];
    at::NoGradGuard no_grad;
    Tensor shard = unit.shard();
    shard.fill_(0.75);
    training.step(0, groups);
    EXPECT_FALSE(shard.eq(0.75).all().item<bool>()) << "the master is the truth until someone says otherwise";
    shard.fill_(0.75);
    for (sharding::Parameter& p : unit.parameters()) p.rewritten = true;
    training.step(1, groups);
    const Tensor master = training.optimizer->states(0)[0].data;
    for (const sharding::Parameter& p : unit.parameters()) {
      const auto [first, last] = unit.owned_range(p);
      const int64_t at = first - unit.shard_begin(), count = last - first;
      EXPECT_TRUE(shard.narrow(0, count > 0 ? at : 0, count).eq(0.75).all().item<bool>()) << p.name;
      EXPECT_TRUE(master.narrow(0, count > 0 ? at : 0, count).eq(0.75).all().item<bool>()) << p.name;
    }
    for (const sharding::Parameter& p : unit.parameters()) EXPECT_FALSE(p.rewritten);
  });
}

TEST(ShardedOptimizer, HoldsAShareOfTheStatesFromStageOneOn) {
  run_ranks(2, [](const World& world) {
    int64_t whole = 0, bytes_wanted = 0;
    for (int stage = 0; stage < 4; ++stage) {
      World own = world;
      own.store = c10::make_intrusive<c10d::PrefixStore>("stage" + std::to_string(stage), world.store);
      const Stage training(own, stage, at::kBFloat16, OptimizerKind::adam);
      const int64_t bytes = training.ledger->current(device::Role::optimizer);
      if (stage == 0) {
        whole = bytes;
        for (const auto& unit : training.units) bytes_wanted += 3 * 4 * unit->numel();
        EXPECT_EQ(whole, bytes_wanted) << "master and two moments in fp32";
      }
      EXPECT_EQ(bytes, stage == 0 ? whole : whole / 2);
      EXPECT_EQ(training.optimizer->state_begin(0), stage == 0 ? 0 : training.units[0]->shard_begin());
    }
    World own = world;
    own.store = c10::make_intrusive<c10d::PrefixStore>("none", world.store);
    const Stage none(own, 1, at::kFloat, OptimizerKind::none);
    EXPECT_EQ(none.ledger->current(device::Role::optimizer), 0);
    EXPECT_TRUE(none.optimizer->states(0).empty());
  });
}

}  // namespace
}  // namespace deeptide::zero
