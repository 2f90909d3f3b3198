// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A stage without model or engine: four parameters in units, a reducer and an optimizer over them.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <map>

#include "ranks.h"
#include "sharding/layout.h"
#include "world/failure_board.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::zero {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

using Groups = std::vector<Hyperparameters>;

inline constexpr int64_t kSizes[] = {50, 1, 33, 200};
inline constexpr int64_t kRows[] = {5, 1, 33, 10};

inline Tensor start_of(int p) { return at::arange(kSizes[p], at::kFloat) / 100 - 0.25 * p; }
inline Tensor gradient_of(int p, int step) { return at::arange(kSizes[p], at::kFloat).sin() * (step + 1); }

/// The group in which the stages of a test reduce, one after another.
inline comm::Group reductions_of(const World& world) {
  return {world,
          comm::Team::whole(world),
          "reductions",
          {.timeout = std::chrono::seconds(60), .board = std::make_shared<world::FailureBoard>(world, "board")}};
}

/// Trains as many consecutive parameters in each of the groups, of which there are one, two or four.
struct Stage {
  Stage(comm::Group& among, int stage, at::ScalarType dtype, const optim::Rule& rule, const Groups& groups,
        const StatePlacement& place = {}, const sharding::ShardPlacement& place_shard = {},
        const StateTypes& types = {})
      : group(among), policy(kStages.at(stage)) {
    at::NoGradGuard no_grad;
    const auto memory = policy.shard_parameters ? sharding::UnitMemory::sharded : sharding::UnitMemory::whole;
    const comm::Team& team = group.team();
    std::vector<sharding::ParameterSpec> specs;
    for (int p = 0; p < 4; ++p) {
      const int group_of = p * static_cast<int>(groups.size()) / 4;
      specs.push_back({"p" + std::to_string(p), kSizes[p], dtype, true, group_of});
    }
    std::vector<Unit*> all;
    for (auto& layout : sharding::build_layout(specs, {}, {group.size(), 0})) {
      std::vector<Parameter> members;
      for (const auto& slot : layout.slots) {
        Parameter p;
        p.name = specs[slot.parameter].name;
        p.tensors = {start_of(slot.parameter).to(dtype).view({kRows[slot.parameter], -1})};
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
      units.back()->adopt(std::move(whole), ledger, place_shard);
      all.push_back(units.back().get());
    }
    const gradients::ReducerOptions options{.reduce_dtype = at::kFloat, .scale = 1.0 / group.size()};
    reducer = std::make_unique<gradients::Reducer>(all, group, nullptr, ledger, at::kCPU, options);
    optimizer =
        std::make_unique<ShardedOptimizer>(all, rule, groups, policy, ledger, group, at::kCPU, place, nullptr, types);
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
      for (const auto& [role, data] : optimizer->states().buffers(static_cast<int>(u))) tensors[role] = data.copy();
      tensors["parameter"] = unit.memory() == sharding::UnitMemory::sharded ? unit.shard().copy() : unit.whole();
      for (const auto& [role, data] : tensors) {
        const Tensor whole = gathered(data, unit);
        for (const Parameter& p : unit.parameters()) {
          const bool has = role == "parameter" || optimizer->states().has(p, role);
          if (has) all[p.name + "/" + role] = p.view_of(whole).clone().view({-1});
        }
      }
    }
    return all;
  }

  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  comm::Group& group;
  StagePolicy policy;
  std::vector<std::unique_ptr<Unit>> units;
  std::unique_ptr<gradients::Reducer> reducer;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

inline void expect_same_bits(const std::map<std::string, Tensor>& one, const std::map<std::string, Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [name, tensor] : one) EXPECT_TRUE(at::equal(tensor, other.at(name))) << name;
}

}  // namespace deeptide::zero
