// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The same step at every stage: over shards or whole units, published or left where it is.
#include "zero/sharded_optimizer.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "tiers/copying_store.h"
#include "zero/stage.h"

namespace deeptide::zero {
namespace {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

/// Two different groups of any rule.
Groups two_groups(const char* type = "AdamW") {
  const Hyperparameters defaults(type);
  Groups groups{defaults, defaults};
  groups[0].set("lr", 0.01).set("weight_decay", 0.1);
  groups[1].set("lr", 0.002);
  if (defaults.has("beta1")) groups[1].set("beta1", 0.8);
  if (defaults.has("centered")) groups[1].set("centered", 1.0).set("momentum", 0.5);
  if (defaults.has("use_muon")) groups[0].set("use_muon", 0.0);
  return groups;
}

/// AdamW in fp64, as in its paper.
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
      comm::Group group = reductions_of(world);
      std::map<std::string, Tensor> expected;
      for (int stage = 0; stage < 4; ++stage) {
        Stage training(group, stage, dtype, optim::find_rule("AdamW"), two_groups());
        for (int step = 0; step < 3; ++step) training.step(step, two_groups());
        EXPECT_EQ(training.optimizer->counts().steps(), 3);
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
        comm::Group group = reductions_of(world);
        std::map<std::string, Tensor> expected;
        for (int stage = 0; stage < 4; ++stage) {
          const Groups groups = two_groups(rule->name().c_str());
          Stage training(group, stage, dtype, *rule, groups);
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
tiers::Buffer in_small_blocks(int64_t numel, int64_t /*resident*/, at::ScalarType dtype) {
  constexpr int64_t kBlock = 7;
  return {std::make_shared<tiers::CopyingStore>(at::zeros({numel}, dtype)), numel, dtype, kBlock};
}

/// The same for a rank's shard of a unit; blocks end elsewhere than those of the states.
tiers::Buffer shard_in_small_blocks(const sharding::UnitLayout& layout) {
  constexpr int64_t kBlock = 5;
  const Tensor zeros = at::zeros({layout.shard}, layout.dtype);
  return {std::make_shared<tiers::CopyingStore>(zeros), layout.shard, layout.dtype, kBlock};
}

TEST_P(Worlds, StepAlikeWhereverShardsLie) {
  for (const optim::Rule* rule : optim::all_rules()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(GetParam(), [&](const World& world) {
        comm::Group group = reductions_of(world);
        const Groups groups = two_groups(rule->name().c_str());
        Stage resident(group, 3, dtype, *rule, groups);
        Stage elsewhere(group, 3, dtype, *rule, groups, &in_small_blocks, &shard_in_small_blocks);
        for (int step = 0; step < 3; ++step) {
          resident.step(step, groups);
          elsewhere.step(step, groups);
        }
        expect_same_bits(elsewhere.state(), resident.state());
      });
    }
  }
}

TEST_P(Worlds, StepAlikeWhereverStatesLie) {
  for (const optim::Rule* rule : optim::all_rules()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(GetParam(), [&](const World& world) {
        comm::Group group = reductions_of(world);
        const Groups groups = two_groups(rule->name().c_str());
        for (int stage : {0, 2, 3}) {
          Stage resident(group, stage, dtype, *rule, groups);
          Stage elsewhere(group, stage, dtype, *rule, groups, &in_small_blocks);
          for (int step = 0; step < 3; ++step) {
            resident.step(step, groups);
            elsewhere.step(step, groups);
          }
          expect_same_bits(elsewhere.state(), resident.state());
          const auto* signs = elsewhere.optimizer->signs();
          EXPECT_EQ(elsewhere.ledger->current(device::Role::optimizer), signs ? signs->predicted().errors : 0)
              << "the placement counts its own";
        }
      });
    }
  }
}

constexpr StateTypes kPacked{.packed_masters = true};

/// Packed masters: at every stage and wherever halves lie, the bits of whole masters.
TEST_P(Worlds, StepPackedMastersAsWholeOnes) {
  for (const optim::Rule* rule : optim::all_rules()) {
    run_ranks(GetParam(), [&](const World& world) {
      comm::Group group = reductions_of(world);
      const Groups groups = two_groups(rule->name().c_str());
      for (int stage : {0, 2, 3}) {
        Stage whole(group, stage, at::kBFloat16, *rule, groups);
        Stage packed(group, stage, at::kBFloat16, *rule, groups, {}, {}, kPacked);
        Stage elsewhere(group, stage, at::kBFloat16, *rule, groups, &in_small_blocks,
                        stage == 3 ? &shard_in_small_blocks : sharding::ShardPlacement(), kPacked);
        for (int step = 0; step < 3; ++step) {
          for (Stage* training : {&whole, &packed, &elsewhere}) training->step(step, groups);
        }
        expect_same_bits(packed.state(), whole.state());
        expect_same_bits(elsewhere.state(), whole.state());
        int64_t bytes = 0;
        for (const auto& unit : packed.units) bytes += 2 * (stage == 0 ? unit->numel() : unit->layout().shard);
        EXPECT_EQ(packed.optimizer->predicted_bytes(), whole.optimizer->predicted_bytes() - bytes);
        EXPECT_EQ(packed.ledger->current(device::Role::optimizer), packed.optimizer->predicted_bytes());
      }
    });
  }
}

TEST_P(Worlds, RoundMomentsByTheElementAlone) {
  for (const char* type : {"AdamW", "SGD", "Lion", "Adagrad"}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      auto groups = two_groups(type);
      if (std::string(type) == "SGD") groups[1].set("momentum", 0.9);
      const optim::Rule& rule = optim::find_rule(type);
      run_ranks(GetParam(), [&](const World& world) {
        comm::Group group = reductions_of(world);
        std::map<std::string, Tensor> expected;
        for (const bool packed : {false, true}) {
          const StateTypes types{.packed_masters = packed, .moments_seed = 3};
          for (int stage = 0; stage < 4; ++stage) {
            Stage training(group, stage, dtype, rule, groups, {}, {}, types);
            Stage elsewhere(group, stage, dtype, rule, groups, &in_small_blocks, {}, types);
            for (int step = 0; step < 3; ++step) {
              training.step(step, groups);
              elsewhere.step(step, groups);
            }
            const auto state = training.state();
            if (expected.empty()) expected = state;
            expect_same_bits(state, expected);
            expect_same_bits(elsewhere.state(), expected);
          }
        }
        const std::string role = rule.roles()[0].name;
        EXPECT_EQ(expected.at("p3/" + role).scalar_type(), at::kBFloat16);
        Stage other(group, 2, dtype, rule, groups, {}, {}, {.moments_seed = 4});
        for (int step = 0; step < 3; ++step) other.step(step, groups);
        EXPECT_FALSE(at::equal(other.state().at("p3/" + role), expected.at("p3/" + role))) << type;
      });
    }
  }
}

TEST_P(Worlds, GoOnFromStatesThatWereWritten) {
  run_ranks(GetParam(), [](const World& world) {
    comm::Group group = reductions_of(world);
    for (int stage : {0, 2, 3}) {
      auto groups = two_groups("SGD");
      for (Hyperparameters& hyper : groups) hyper.set("momentum", 0.9);
      Stage training(group, stage, at::kBFloat16, optim::find_rule("SGD"), groups);
      training.step(0, groups);
      for (size_t u = 0; u < training.units.size(); ++u) {
        for (const auto& [role, data] : training.optimizer->states().buffers(static_cast<int>(u)))
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

/// A parameter that no backward reached keeps every bit, and has its own count of steps afterwards.
TEST_P(Worlds, LeaveInactiveParametersAloneAtEveryStage) {
  run_ranks(GetParam(), [&](const World& world) {
    comm::Group group = reductions_of(world);
    for (int stage = 0; stage < 4; ++stage) {
      Stage training(group, stage, at::kBFloat16, optim::find_rule("AdamW"), two_groups());
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
      EXPECT_EQ(training.optimizer->counts().uneven_steps(), (std::map<std::string, int64_t>{{"p1", 1}}));
      training.optimizer->counts().set_steps(7, {{"p2", 3}});
      EXPECT_EQ(training.optimizer->counts().uneven_steps(), (std::map<std::string, int64_t>{{"p2", 3}}));
    }
  });
}

TEST(ShardedOptimizer, FollowsParametersThatWereRewritten) {
  run_ranks(2, [](const World& world) {
    comm::Group group = reductions_of(world);
    auto groups = two_groups();
    for (Hyperparameters& hyper : groups) hyper.set("lr", 0.0);
    Stage training(group, 3, at::kBFloat16, optim::find_rule("AdamW"), groups);
    Unit& unit = *training.units[0];
    at::NoGradGuard no_grad;
    Tensor shard = unit.shard().in_place();
    shard.fill_(0.75);
    training.step(0, groups);
    EXPECT_FALSE(shard.eq(0.75).all().item<bool>()) << "the master is the truth until someone says otherwise";
    shard.fill_(0.75);
    for (sharding::Parameter& p : unit.parameters()) p.rewritten = true;
    training.step(1, groups);
    const Tensor master = training.optimizer->states().master(0).copy();
    for (const sharding::Parameter& p : unit.parameters()) {
      const auto [first, last] = unit.owned_range(p);
      const int64_t at = first - unit.shard_begin(), count = last - first;
      EXPECT_TRUE(shard.narrow(0, count > 0 ? at : 0, count).eq(0.75).all().item<bool>()) << p.name;
      EXPECT_TRUE(master.narrow(0, count > 0 ? at : 0, count).eq(0.75).all().item<bool>()) << p.name;
    }
    for (const sharding::Parameter& p : unit.parameters()) EXPECT_FALSE(p.rewritten);
  });
}

/// Also where the master has more bits than the parameter, and where only one parameter of a unit was written.
TEST(ShardedOptimizer, TakesARewrittenParameterAsItsPackedMaster) {
  run_ranks(2, [](const World& world) {
    comm::Group group = reductions_of(world);
    auto groups = two_groups();
    Stage training(group, 3, at::kBFloat16, optim::find_rule("AdamW"), groups, {}, {}, kPacked);
    training.step(0, groups);
    const auto before = training.state();
    EXPECT_FALSE(at::equal(before.at("p0/master"), before.at("p0/parameter").to(at::kFloat)));
    for (const auto& unit : training.units) {
      for (sharding::Parameter& p : unit->parameters()) p.rewritten = training.number(p) == 0;
    }
    training.optimizer->states().refresh_masters();
    const auto after = training.state();
    EXPECT_TRUE(at::equal(after.at("p0/master"), before.at("p0/parameter").to(at::kFloat)));
    for (const char* other : {"p1/master", "p2/master", "p3/master"}) {
      EXPECT_TRUE(at::equal(after.at(other), before.at(other))) << other;
    }
  });
}

TEST(ShardedOptimizer, HoldsAShareOfTheStatesFromStageOneOn) {
  run_ranks(2, [](const World& world) {
    comm::Group group = reductions_of(world);
    int64_t whole = 0, bytes_wanted = 0;
    for (int stage = 0; stage < 4; ++stage) {
      const Stage training(group, stage, at::kBFloat16, optim::find_rule("AdamW"), two_groups());
      const int64_t bytes = training.ledger->current(device::Role::optimizer);
      if (stage == 0) {
        whole = bytes;
        for (const auto& unit : training.units) bytes_wanted += 3 * 4 * unit->numel();
        EXPECT_EQ(whole, bytes_wanted) << "master and two moments in fp32";
      }
      EXPECT_EQ(bytes, stage == 0 ? whole : whole / 2);
      EXPECT_EQ(training.optimizer->states().begin(0), stage == 0 ? 0 : training.units[0]->shard_begin());
    }
  });
}

TEST(ShardedOptimizer, KeepsAMomentumFromTheStepOnThatNeedsIt) {
  run_ranks(2, [](const World& world) {
    comm::Group group = reductions_of(world);
    auto groups = two_groups("SGD");
    Stage training(group, 1, at::kFloat, optim::find_rule("SGD"), groups);
    training.step(0, groups);
    EXPECT_EQ(training.ledger->current(device::Role::optimizer), 0) << "fp32 masters are the parameters themselves";
    auto& states = training.optimizer->states();
    for (int u = 0; u < states.num_units(); ++u) EXPECT_EQ(states.buffers(u).size(), 1u);
    groups[1].set("momentum", 0.5);
    training.step(1, groups);
    int64_t bytes = 0;
    for (int u = 0; u < states.num_units(); ++u) {
      const auto& members = states.unit(u).parameters();
      const bool moves = std::any_of(members.begin(), members.end(), [](const Parameter& p) { return p.group == 1; });
      ASSERT_EQ(states.buffers(u).size(), moves ? 2u : 1u);
      if (moves) {
        EXPECT_EQ(states.buffers(u)[1].role, "momentum");
        bytes += states.buffers(u)[1].data.nbytes();
      }
    }
    EXPECT_EQ(training.ledger->current(device::Role::optimizer), bytes);
    EXPECT_EQ(states.predicted_bytes(), bytes);
    const auto state = training.state();
    EXPECT_TRUE(at::equal(state.at("p2/momentum"), gradient_of(2, 1))) << "0.5 * 0 + gradient";
    EXPECT_FALSE(state.contains("p0/momentum")) << "its group has none";
    EXPECT_EQ(states.unkept(), (std::set<StateName>{{"p0", "momentum"}, {"p1", "momentum"}}));
    states.zero({{"p2", "momentum"}});
    EXPECT_FALSE(training.state().at("p2/momentum").any().item<bool>());
    EXPECT_TRUE(at::equal(training.state().at("p3/momentum"), state.at("p3/momentum")));
  });
}

/// LAMB in fp64, as its file has it.
Tensor lamb(int p, int steps, const Hyperparameters& h) {
  Tensor w = start_of(p).to(at::kDouble), m = w * 0, v = w * 0;
  const double beta1 = h.get("beta1"), beta2 = h.get("beta2");
  for (int step = 0; step < steps; ++step) {
    const Tensor g = gradient_of(p, step).to(at::kDouble);
    m = m * beta1 + g * (1 - beta1);
    v = v * beta2 + g * g * (1 - beta2);
    const Tensor u = m / (v.sqrt() + h.get("eps")) + w * h.get("weight_decay");
    const double norm = w.norm().item<double>(), update = u.norm().item<double>();
    const double ratio = norm > 0 && update > 0 ? std::clamp(norm / update, h.get("min_coeff"), h.get("max_coeff")) : 1;
    const double rate = h.lr() * std::sqrt(1 - std::pow(beta2, step + 1)) / (1 - std::pow(beta1, step + 1));
    w = w - u * (rate * ratio);
  }
  return w;
}

TEST_P(Worlds, ScaleAStepByTheNormsOfWholeParametersWhereverTheyAreCut) {
  run_ranks(GetParam(), [&](const World& world) {
    comm::Group group = reductions_of(world);
    const Groups groups = two_groups("Lamb");
    Stage training(group, 2, at::kFloat, optim::find_rule("Lamb"), groups);
    for (int step = 0; step < 3; ++step) training.step(step, groups);
    const auto state = training.state();
    for (int p = 0; p < 4; ++p) {
      const std::string name = "p" + std::to_string(p);
      // A weight of at most 2 moves by at most lr times max_coeff; a dozen fp32 roundings of each.
      EXPECT_TRUE(at::allclose(state.at(name + "/master").to(at::kDouble), lamb(p, 3, groups[p / 2]), 1e-6, 1e-6))
          << name;
    }
  });
}

TEST_P(Worlds, StepWholeMatricesWhereverTheyAreCut) {
  run_ranks(GetParam(), [&](const World& world) {
    comm::Group group = reductions_of(world);
    const auto& muon = dynamic_cast<const optim::MatrixRule&>(optim::find_rule("Muon"));
    const Groups groups = two_groups("Muon");
    Stage training(group, 2, at::kFloat, muon, groups);
    std::map<int, optim::Segment> whole;
    for (int p : {2, 3}) {
      whole[p] = {start_of(p), {at::zeros({kSizes[p]}), {}, {}}, {}, {}, kRows[p]};
    }
    for (int step = 0; step < 3; ++step) {
      training.step(step, groups);
      for (auto& [p, segment] : whole) {
        segment.gradient = {gradient_of(p, step)};
        muon.step(segment, groups[1], {step + 1, 1.0});
      }
    }
    const auto state = training.state();
    for (const auto& [p, segment] : whole) {
      EXPECT_TRUE(at::equal(state.at("p" + std::to_string(p) + "/master"), segment.master)) << p;
      EXPECT_FALSE(state.contains("p" + std::to_string(p) + "/exp_avg")) << "AdamW's states are the rest's";
    }
    EXPECT_FALSE(state.contains("p0/momentum_buffer"));
    EXPECT_TRUE(state.contains("p0/exp_avg_sq"));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace deeptide::zero
