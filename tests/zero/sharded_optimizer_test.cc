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
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "deeptide/errors.h"
#include "ranks.h"
#include "sharding/layout.h"
#include "tiers/copying_store.h"
#include "world/failure_board.h"

namespace deeptide::zero {
namespace {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

using Groups = std::vector<Hyperparameters>;

constexpr int64_t kSizes[] = {50, 1, 33, 200};  // the first two train in group 0, the others in group 1

Tensor start_of(int p) { return at::arange(kSizes[p], at::kFloat) / 100 - 0.25 * p; }
Tensor gradient_of(int p, int step) { return at::arange(kSizes[p], at::kFloat).sin() * (step + 1); }

/// Four parameters in two units, a reducer and an optimizer over them: a stage without model or engine.
struct Stage {
  Stage(const World& world, int stage, at::ScalarType dtype, const optim::Rule& rule, const Groups& groups,
        const StatePlacement& place = {})
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
        p.group = specs[slot.parameter].group;
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
    optimizer = std::make_unique<ShardedOptimizer>(all, rule, groups, policy, ledger, group, at::kCPU, place);
  }

  int number(const Parameter& p) const { return p.name[1] - '0'; }

  void step(int count, const Groups& groups, double scale = 1.0, const ActiveParameters& active = {}) {
    for (size_t u = units.size(); u-- > 0;) {
      for (size_t i = 0; i < units[u]->parameters().size(); ++i) {
        const int p = number(units[u]->parameters()[i]);
        reducer->add(static_cast<int>(u), static_cast<int>(i), gradient_of(p, count));
      }
    }
    reducer->finish(1);
    optimizer->step(*reducer, scale, groups, active);
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
      std::map<std::string, Tensor> tensors;
      for (const auto& [role, data] : optimizer->states(static_cast<int>(u))) tensors[role] = data.copy();
      tensors["parameter"] = unit.memory() == sharding::UnitMemory::sharded ? unit.shard() : unit.whole();
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

/// Two groups that differ, of any rule.
Groups two_groups(const char* type = "AdamW") {
  const Hyperparameters defaults(type);
  Groups groups{defaults, defaults};
  groups[0].set("lr", 0.01).set("weight_decay", 0.1);
  groups[1].set("lr", 0.002);
  if (defaults.has("beta1")) groups[1].set("beta1", 0.8);
  return groups;
}

/// A store of this name, so that several stages on the same ranks do not meet.
World apart(const World& world, const std::string& name) {
  World own = world;
  own.store = c10::make_intrusive<c10d::PrefixStore>(name, world.store);
  return own;
}

/// AdamW in fp64, as its paper has it.
Tensor adamw(int p, int steps, const Hyperparameters& h) {
  Tensor w = start_of(p).to(at::kDouble), m = w * 0, v = w * 0;
  const double lr = h.lr(), beta1 = h.get("beta1"), beta2 = h.get("beta2");
  for (int step = 0; step < steps; ++step) {
    const Tensor g = gradient_of(p, step).to(at::kDouble);
    w = w * (1 - lr * h.get("weight_decay"));
    m = m * beta1 + g * (1 - beta1);
    v = v * beta2 + g * g * (1 - beta2);
    const double c1 = 1 - std::pow(beta1, step + 1), c2 = 1 - std::pow(beta2, step + 1);
    w = w - (m / c1) / ((v / c2).sqrt() + h.get("eps")) * lr;
  }
  return w;
}

class Worlds : public testing::TestWithParam<int> {};

TEST_P(Worlds, StepAlikeAtEveryStageUnderEachGroupsOwnHyperparameters) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(GetParam(), [&](const World& world) {
      std::map<std::string, Tensor> expected;
      for (int stage = 0; stage < 4; ++stage) {
        const World own = apart(world, "stage" + std::to_string(stage));
        Stage training(own, stage, dtype, optim::find_rule("AdamW"), two_groups());
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

TEST_P(Worlds, StepEveryRuleAlikeAtEveryStage) {
  for (const optim::Rule* rule : optim::all_rules()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(GetParam(), [&](const World& world) {
        std::map<std::string, Tensor> expected;
        for (int stage = 0; stage < 4; ++stage) {
          const World own = apart(world, "stage" + std::to_string(stage));
          const Groups groups = two_groups(rule->name().c_str());
          Stage training(own, stage, dtype, *rule, groups);
          for (int step = 0; step < 3; ++step) training.step(step, groups);
          const auto state = training.state();
          if (stage == 0) expected = state;
          expect_same_bits(state, expected);
        }
        EXPECT_FALSE(at::equal(expected.at("p0/master"), start_of(0))) << rule->name() << " moved nothing";
      });
    }
  }
}

/// States elsewhere, in blocks of a few elements, as a tier of files would hold them.
tiers::Buffer in_small_blocks(int64_t numel) {
  constexpr int64_t kBlock = 7;
  return {std::make_shared<tiers::CopyingStore>(at::zeros({numel})), numel, at::kFloat, kBlock};
}

TEST_P(Worlds, StepAlikeWhereverStatesLie) {
  for (const optim::Rule* rule : optim::all_rules()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(GetParam(), [&](const World& world) {
        const Groups groups = two_groups(rule->name().c_str());
        for (int stage : {0, 2, 3}) {
          const std::string name = std::to_string(stage);
          Stage resident(apart(world, "resident" + name), stage, dtype, *rule, groups);
          Stage elsewhere(apart(world, "elsewhere" + name), stage, dtype, *rule, groups, &in_small_blocks);
          for (int step = 0; step < 3; ++step) {
            resident.step(step, groups);
            elsewhere.step(step, groups);
          }
          expect_same_bits(elsewhere.state(), resident.state());
          EXPECT_EQ(elsewhere.ledger->current(device::Role::optimizer), 0) << "the placement counts its own";
        }
      });
    }
  }
}

TEST_P(Worlds, GoOnFromStatesThatWereWritten) {
  run_ranks(GetParam(), [](const World& world) {
    for (int stage : {0, 2, 3}) {
      const World own = apart(world, "stage" + std::to_string(stage));
      auto groups = two_groups("SGD");
      for (Hyperparameters& hyper : groups) hyper.set("momentum", 0.9);
      Stage training(own, stage, at::kBFloat16, optim::find_rule("SGD"), groups);
      training.step(0, groups);
      for (size_t u = 0; u < training.units.size(); ++u) {
        for (const auto& [role, data] : training.optimizer->states(static_cast<int>(u)))
          data.lease(data.block(0), tiers::Access::write).tensor().fill_(role == "master" ? 0.3 : 0.0);
      }
      training.optimizer->publish_all();
      for (const auto& [name, tensor] : training.state()) {
        if (name.find("/parameter") == std::string::npos) continue;
        EXPECT_TRUE(at::equal(tensor, at::full(tensor.sizes(), 0.3f).to(at::kBFloat16))) << name << ", stage " << stage;
      }
    }
  });
}

/// What no backward reached keeps every bit, and has its own count of steps afterwards.
TEST_P(Worlds, LeaveInactiveParametersAloneAtEveryStage) {
  run_ranks(GetParam(), [&](const World& world) {
    for (int stage = 0; stage < 4; ++stage) {
      const World own = apart(world, "stage" + std::to_string(stage));
      Stage training(own, stage, at::kBFloat16, optim::find_rule("AdamW"), two_groups());
      training.step(0, two_groups());
      const auto before = training.state();
      ActiveParameters active;
      for (const auto& unit : training.units) {
        auto& flags = active.by_unit.emplace_back();
        for (const Parameter& p : unit->parameters()) flags.push_back(training.number(p) != 1);
      }
      training.step(1, two_groups(), 1.0, active);
      const auto after = training.state();
      for (const auto& [name, tensor] : before) {
        EXPECT_EQ(at::equal(tensor, after.at(name)), name.starts_with("p1/")) << name << " at stage " << stage;
      }
      EXPECT_EQ(training.optimizer->uneven_steps(), (std::map<std::string, int64_t>{{"p1", 1}}));
      training.optimizer->set_steps(7, {{"p2", 3}});
      EXPECT_EQ(training.optimizer->uneven_steps(), (std::map<std::string, int64_t>{{"p2", 3}}));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3));

TEST(ShardedOptimizer, FollowsParametersThatWereRewritten) {
  run_ranks(2, [](const World& world) {
    auto groups = two_groups();
    for (Hyperparameters& hyper : groups) hyper.set("lr", 0.0);
    Stage training(world, 3, at::kBFloat16, optim::find_rule("AdamW"), groups);
    Unit& unit = *training.units[0];
    at::NoGradGuard no_grad;
    Tensor shard = unit.shard();
    shard.fill_(0.75);
    training.step(0, groups);
    EXPECT_FALSE(shard.eq(0.75).all().item<bool>()) << "the master is the truth until someone says otherwise";
    shard.fill_(0.75);
    for (sharding::Parameter& p : unit.parameters()) p.rewritten = true;
    training.step(1, groups);
    const Tensor master = training.optimizer->states(0)[0].data.copy();
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
      const World own = apart(world, "stage" + std::to_string(stage));
      const Stage training(own, stage, at::kBFloat16, optim::find_rule("AdamW"), two_groups());
      const int64_t bytes = training.ledger->current(device::Role::optimizer);
      if (stage == 0) {
        whole = bytes;
        for (const auto& unit : training.units) bytes_wanted += 3 * 4 * unit->numel();
        EXPECT_EQ(whole, bytes_wanted) << "master and two moments in fp32";
      }
      EXPECT_EQ(bytes, stage == 0 ? whole : whole / 2);
      EXPECT_EQ(training.optimizer->state_begin(0), stage == 0 ? 0 : training.units[0]->shard_begin());
    }
  });
}

TEST(ShardedOptimizer, KeepsAMomentumFromTheStepOnThatNeedsIt) {
  run_ranks(2, [](const World& world) {
    auto groups = two_groups("SGD");
    Stage training(world, 1, at::kFloat, optim::find_rule("SGD"), groups);
    training.step(0, groups);
    EXPECT_EQ(training.ledger->current(device::Role::optimizer), 0) << "fp32 masters are the parameters themselves";
    EXPECT_EQ(training.optimizer->states(0).size(), 1u);
    EXPECT_EQ(training.optimizer->num_states(), 0);
    groups[1].set("momentum", 0.5);  // one group is enough
    training.step(1, groups);
    ASSERT_EQ(training.optimizer->states(0).size(), 2u);
    EXPECT_EQ(training.optimizer->states(0)[1].role, "momentum");
    EXPECT_EQ(training.optimizer->num_states(), 1);
    const auto state = training.state();
    EXPECT_TRUE(at::equal(state.at("p2/momentum"), gradient_of(2, 1))) << "0.5 * 0 + gradient";
    EXPECT_FALSE(state.at("p0/momentum").any().item<bool>()) << "its group has none";
    training.optimizer->zero_states({"momentum"});
    EXPECT_FALSE(training.state().at("p2/momentum").any().item<bool>());
  });
}

/// A rule that needs more than the elements of a shard; never stepped.
class Reaching final : public optim::Rule {
 public:
  explicit Reaching(optim::Reach reach) : Rule(*find_optimizer("SGD"), {}, reach) {}

 private:
  void step_cpu(const optim::Segment&, const Hyperparameters&, const optim::StepTerms&) const override {}
  void step_aten(const optim::Segment&, const Hyperparameters&, const optim::StepTerms&) const override {}
};

TEST(ShardedOptimizer, RefusesARuleThatReachesBeyondElementsByName) {
  run_ranks(1, [](const World& world) {
    const auto refusal = [&](optim::Reach reach) -> std::string {
      const Reaching rule(reach);
      try {
        const Stage training(world, 1, at::kFloat, rule, two_groups("SGD"));
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_NE(refusal(optim::Reach::parameter_norms).find("SGD needs sums over each whole parameter"),
              std::string::npos);
    EXPECT_NE(refusal(optim::Reach::whole_parameter).find("SGD needs each whole parameter as a matrix"),
              std::string::npos);
    EXPECT_EQ(refusal(optim::Reach::elementwise), "");
  });
}

}  // namespace
}  // namespace deeptide::zero
