// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Offers what this rank's gradients make, and takes what all ranks' signs make of that.
#include "zero/steps/sign_steps.h"

namespace deeptide::zero {

using at::Tensor;
using optim::Segment;
using tiers::Access;
using tiers::Block;

SignSteps::SignSteps(const StepTools& tools, std::shared_ptr<device::Ledger> ledger)
    : tools_(tools),
      rule_(*tools.rule().compressed()),
      exchange_(tools.states.units(), tools.teams, std::move(ledger), tools.device) {}

void SignSteps::step(gradients::Reducer& reducer, const StepInput& input) {
  const auto& active = input.active;
  const int num_units = tools_.states.num_units();
  std::vector<std::vector<Run>> runs;
  for (int i = 0; i < num_units; ++i) {
    tools_.states.refresh_masters(i);
    runs.push_back(tools_.counts.count_step(i, active, input.groups));
    if (runs[i].empty()) continue;
    const UnitPass pass{i, reducer.local_gradient(i), input.gradient_scale, input.groups};
    const Tensor& carried = exchange_.carried(i);
    for (const Run& run : runs[i]) {
      tools_.segments.each(pass, run, {Access::read, Access::read}, [&](Block block, const Segment& segment) {
        rule_.offer(segment, pass.hyper(run), pass.terms(run), carried.narrow(0, block.begin, block.count));
      });
    }
    exchange_.send(i, active);
  }
  for (int i = 0; i < num_units; ++i) {
    if (!runs[i].empty()) exchange_.serve(i, active);
  }
  for (int i = 0; i < num_units; ++i) {
    if (runs[i].empty()) continue;
    const UnitPass pass{i, {}, input.gradient_scale, input.groups};
    Tensor mean = tools_.pool.take(tools_.states.unit(i).numel(), at::kFloat);
    exchange_.receive(i, active, mean);
    for (const Run& run : runs[i]) take_mean(pass, run, mean);
    tools_.pool.put(std::move(mean));
  }
}

/// A rank that steps by signs has whole parameters: no norm needs another rank.
void SignSteps::take_mean(const UnitPass& pass, const Run& run, const Tensor& mean) {
  const Hyperparameters& hyper = pass.hyper(run);
  const Block range = tools_.states.own_part(pass.unit, run.begin, run.end);
  if (const auto* elements = rule_.by_elements()) {
    tools_.segments.each(pass, run, {Access::update, Access::update}, [&](Block block, const Segment& segment) {
      elements->take(segment, hyper, pass.terms(run), mean.narrow(0, block.begin, block.count));
    });
    return;
  }
  const optim::CompressedNormRule& norm_rule = *rule_.by_norms();
  const std::span<double> numbers = tools_.counts.numbers(pass.unit, run.parameter);
  optim::TakenSums sums(range.count);
  tools_.segments.each(pass, run, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
    norm_rule.take_states(segment, hyper, numbers, mean.narrow(0, block.begin, block.count), block.begin - range.begin,
                          sums);
  });
  const double ratio = norm_rule.taken_ratio(sums, hyper, numbers);
  tools_.segments.each(pass, run, {Access::update, Access::read},
                       [&](Block, const Segment& segment) { norm_rule.apply(segment, hyper, pass.terms(run), ratio); });
}

}  // namespace deeptide::zero
