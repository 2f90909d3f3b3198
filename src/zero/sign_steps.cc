// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules whose ranks exchange signs.
#include "optim/compressed_rule.h"
#include "zero/sharded_optimizer.h"

namespace deeptide::zero {

using at::Tensor;
using optim::CompressedElementRule;
using optim::CompressedNormRule;
using optim::CompressedRule;
using optim::Segment;
using tiers::Access;
using tiers::Block;

/// Ranks hold their own gradients: what travels is the signs of what each makes of them.
void ShardedOptimizer::step_by_signs(gradients::Reducer& reducer, double gradient_scale,
                                     const std::vector<Hyperparameters>& groups, const ActiveParameters& active) {
  const auto& compressed = dynamic_cast<const CompressedRule&>(rule());
  std::vector<std::vector<Run>> runs;
  for (int i = 0; i < states_.num_units(); ++i) {
    states_.refresh_masters(i);
    runs.push_back(states_.count_step(i, active, groups));
    if (runs[i].empty()) continue;
    const UnitPass pass{i, reducer.local_gradient(i), gradient_scale, groups};
    const Tensor& carried = signs_->carried(i);
    for (const Run& run : runs[i]) {
      each_segment(pass, run, own_part(i, run.begin, run.end), {Access::read, Access::read},
                   [&](Block block, const Segment& segment) {
                     compressed.offer(segment, groups.at(run.group), pass.terms(run),
                                      carried.narrow(0, block.begin, block.count));
                   });
    }
    signs_->send(i, active);
  }
  for (int i = 0; i < states_.num_units(); ++i) {
    if (!runs[i].empty()) signs_->serve(i, active);
  }
  for (int i = 0; i < states_.num_units(); ++i) {
    if (runs[i].empty()) continue;
    const UnitPass pass{i, {}, gradient_scale, groups};
    Tensor mean = pool_.take(units_[i]->numel(), at::kFloat);
    signs_->receive(i, active, mean);
    for (const Run& run : runs[i]) take_mean(pass, run, mean);
    pool_.put(std::move(mean));
  }
}

/// A rank that steps by signs has whole parameters: no norm needs another rank.
void ShardedOptimizer::take_mean(const UnitPass& pass, const Run& run, const Tensor& mean) {
  const Hyperparameters& hyper = pass.groups.at(run.group);
  const Block range = own_part(pass.unit, run.begin, run.end);
  if (const auto* elements = dynamic_cast<const CompressedElementRule*>(&rule())) {
    each_segment(pass, run, range, {Access::update, Access::update}, [&](Block block, const Segment& segment) {
      elements->take(segment, hyper, pass.terms(run), mean.narrow(0, block.begin, block.count));
    });
    return;
  }
  const auto& norm_rule = dynamic_cast<const CompressedNormRule&>(rule());
  const std::span<double> numbers = states_.numbers(pass.unit, run.parameter);
  optim::TakenSums sums(range.count);
  each_segment(pass, run, range, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
    norm_rule.take_states(segment, hyper, numbers, mean.narrow(0, block.begin, block.count), block.begin - range.begin,
                          sums);
  });
  const double ratio = norm_rule.taken_ratio(sums, hyper, numbers);
  each_segment(pass, run, range, {Access::update, Access::read},
               [&](Block, const Segment& segment) { norm_rule.apply(segment, hyper, pass.terms(run), ratio); });
}

}  // namespace deeptide::zero
