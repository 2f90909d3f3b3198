// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules whose ratios need norms of whole parameters.
#include "zero/steps/norm_steps.h"

#include <algorithm>

namespace deeptide::zero {

using optim::Segment;
using tiers::Access;
using tiers::Block;

NormSteps::NormSteps(const StepTools& tools)
    : tools_(tools), rule_(*tools.rule().norms()), norms_(tools.states.units(), tools.group().team()) {}

void NormSteps::measure(const UnitPass& pass, const Run& run) {
  const sharding::Unit& unit = tools_.states.unit(pass.unit);
  const int64_t shard = unit.layout().shard;
  for (int slice = 0; slice < unit.shard_over().size(); ++slice) {
    const int64_t begin = std::max(run.begin, slice * shard), end = std::min(run.end, (slice + 1) * shard);
    const Block range = begin < end ? tools_.states.own_part(pass.unit, begin, end) : Block();
    if (range.count == 0) continue;
    optim::NormSums& sums = norms_.sums(slice, pass.unit, run.parameter, range.count);
    const auto visit = [&](Block block, const Segment& segment) {
      rule_.measure(segment, pass.hyper(run), pass.terms(run), block.begin - range.begin, sums);
    };
    tools_.segments.each(pass, run, range, {Access::read, Access::update}, visit);
    if (pass.side == Side::both) norms_.settle();  // else the host would wait for the device within its own steps
  }
}

void NormSteps::exchange(const std::vector<std::vector<Run>>& runs, const std::vector<Hyperparameters>& groups) {
  norms_.settle();
  const auto& units = tools_.states.units();
  const bool are_cut = std::any_of(units.begin(), units.end(), [](const auto* unit) { return unit->cut_over(); });
  const bool has_parts = tools_.policy.shard_optimizer || are_cut;
  if (has_parts && tools_.group().size() > 1) norms_.exchange(tools_.group(), tools_.device);
  for (int i = 0; i < tools_.states.num_units(); ++i) {
    std::vector<double>& ratios = ratios_.emplace_back();
    for (const Run& run : runs[i]) {
      const std::span<double> numbers = tools_.counts.numbers(i, run.parameter);
      ratios.push_back(rule_.next_ratio(norms_.whole(i, run.parameter), groups.at(run.group), numbers));
    }
  }
}

void NormSteps::apply(const UnitPass& pass, const std::vector<Run>& runs) const {
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto visit = [&](Block, const Segment& segment) {
      rule_.apply(segment, pass.hyper(runs[i]), pass.terms(runs[i]), ratios_[pass.unit][i]);
    };
    tools_.segments.each(pass, runs[i], {Access::update, Access::read}, visit);
  }
}

}  // namespace deeptide::zero
