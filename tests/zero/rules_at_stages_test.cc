// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every rule under all its variants of hyper-parameters, over fifty steps, at every stage of every world, equals the
// rule on whole parameters in one process.
#include <ATen/ops/allclose.h>

#include <algorithm>

#include "optim/segments.h"
#include "zero/stage.h"

namespace deeptide::zero {
namespace {

using at::Tensor;

constexpr int kSteps = 50;

/// Four groups at a time, one for each parameter, until every variant has had its turn.
std::vector<Groups> fours_of(const optim::Rule& rule) {
  const Groups variants = optim::variants_of(rule);
  std::vector<Groups> fours;
  for (size_t first = 0; first < variants.size(); first += 4) {
    Groups four;
    for (size_t p = 0; p < 4; ++p) four.push_back(variants[(first + p) % variants.size()]);
    fours.push_back(std::move(four));
  }
  return fours;
}

/// The same steps of each whole parameter; "p0/master", "p0/exp_avg", ….
std::map<std::string, Tensor> stepped_alone(const optim::Rule& rule, const Groups& groups, int world) {
  std::map<std::string, Tensor> state;
  for (int p = 0; p < 4; ++p) {
    const Hyperparameters& hyper = groups[p];
    optim::Segment segment{start_of(p), {}, {}, {}, kRows[p]};
    for (size_t role = 0; role < rule.roles().size(); ++role) {
      segment.states.push_back(rule.keeps(role, hyper) ? at::zeros({kSizes[p]}) : Tensor());
    }
    for (int step = 0; step < kSteps; ++step) {
      segment.gradient = {std::vector<Tensor>(world, gradient_of(p, step % 7)), 1.0 / world};
      rule.step(segment, hyper, {step + 1, 0.5});
    }
    const std::string name = "p" + std::to_string(p) + "/";
    state[name + "master"] = state[name + "parameter"] = segment.master;
    for (size_t role = 0; role < rule.roles().size(); ++role) {
      if (segment.states[role].defined()) state[name + rule.roles()[role].name] = segment.states[role];
    }
  }
  return state;
}

void expect_close(const std::map<std::string, Tensor>& one, const std::map<std::string, Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [name, tensor] : one) EXPECT_TRUE(at::allclose(tensor, other.at(name), 1e-6, 1e-6)) << name;
}

class EveryRuleInWorlds : public testing::TestWithParam<std::tuple<const optim::Rule*, int>> {};

TEST_P(EveryRuleInWorlds, StepsAtEveryStageAsItStepsWholeParameters) {
  const auto [rule, size] = GetParam();
  for (const Groups& groups : fours_of(*rule)) {
    const auto alone = stepped_alone(*rule, groups, size);
    run_ranks(size, [&, rule = rule](const World& world) {
      comm::Group group = reductions_of(world);
      std::map<std::string, Tensor> first;
      for (int stage = 0; stage < 4; ++stage) {
        Stage training(group, stage, at::kFloat, *rule, groups);
        for (int step = 0; step < kSteps; ++step) training.step(step % 7, groups, 0.5);
        const auto state = training.state();
        if (stage == 0) first = state;
        expect_same_bits(state, first);
      }
      const bool sums = std::any_of(groups.begin(), groups.end(), [&](const Hyperparameters& hyper) {
        return rule->reach(hyper) == optim::Reach::parameter_norms;
      });
      // Alone, squares are added in one slice, here in one for each rank: the norms may differ in fp64's last bits.
      sums ? expect_close(first, alone) : expect_same_bits(first, alone);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, EveryRuleInWorlds,
                         testing::Combine(testing::ValuesIn(optim::all_rules()), testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param)->name() + "On" + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace deeptide::zero
