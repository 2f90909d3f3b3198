// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Offers what this rank's gradients make, and takes what all ranks' signs make of that.
#include "zero/steps/sign_steps.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/invariant.h"
#include "comm/device_read.h"
#include "sharding/tensor_slices.h"

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
  if (rule_.by_norms()) apply(input);
}

void SignSteps::take_mean(const UnitPass& pass, const Run& run, const Tensor& mean) {
  const auto* elements = rule_.by_elements();
  if (elements == nullptr) return measure(pass, run, mean);
  tools_.segments.each(pass, run, {Access::update, Access::update}, [&](Block block, const Segment& segment) {
    elements->take(segment, pass.hyper(run), pass.terms(run), mean.narrow(0, block.begin, block.count));
  });
}

/// The zeros after the last slice of a parameter are no elements of it, and signs tell nothing of them.
void SignSteps::measure(const UnitPass& pass, const Run& run, const Tensor& mean) {
  const sharding::Unit& unit = tools_.states.unit(pass.unit);
  Run own = run;
  if (unit.cut_over()) {
    const sharding::Parameter& p = unit.parameters()[run.parameter];
    own.end = run.begin + sharding::numel_before_padding(*p.slice, p.tensors.front().sizes(), *unit.cut_over());
  }
  const Block range = tools_.states.own_part(pass.unit, own.begin, own.end);
  const std::span<double> numbers = tools_.counts.numbers(pass.unit, run.parameter);
  optim::TakenSums sums(range.count);
  tools_.segments.each(pass, own, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
    rule_.by_norms()->take_states(segment, pass.hyper(run), numbers, mean.narrow(0, block.begin, block.count),
                                  block.begin - range.begin, sums);
  });
  measured_.push_back({pass.unit, own, sums.totals()});
}

/// A rank that steps by signs has whole parameters, or whole slices: those of a parameter are added in the ranks'
/// order.
void SignSteps::join_slices() {
  std::vector<optim::TakenTotals*> parts;
  const comm::Team* team = nullptr;
  for (Measured& measured : measured_) {
    const auto& cut_over = tools_.states.unit(measured.unit).cut_over();
    if (!cut_over) continue;
    DEEPTIDE_INVARIANT(team == nullptr || *team == *cut_over, "slices of one rank have several teams");
    team = &*cut_over;
    parts.push_back(&measured.totals);
  }
  if (team == nullptr) return;
  comm::Group& group = tools_.teams.of(*team);
  const auto count = static_cast<int64_t>(parts.size());
  Tensor own = at::empty({count, 3}, at::kDouble);
  auto places = own.accessor<double, 2>();
  for (int64_t i = 0; i < count; ++i) {
    optim::TakenTotals& part = *parts[i];
    places[i][0] = part.direction, places[i][1] = part.update, places[i][2] = part.factor;
    part = {};
  }
  own = own.to(tools_.device);
  Tensor all = at::empty({group.size() * own.numel()}, own.options());
  auto pending = group.all_gather(all, own.reshape({-1}));
  group.wait(pending, {"step", "gathering the norms of slices"});
  all = read_on_host(group, all, {"step", "reading the norms of slices"}).view({group.size(), count, 3});
  const auto rows = all.accessor<double, 3>();
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      parts[i]->direction += rows[rank][i][0];
      parts[i]->update += rows[rank][i][1];
      parts[i]->factor = std::max(parts[i]->factor, rows[rank][i][2]);
    }
  }
}

void SignSteps::apply(const StepInput& input) {
  const optim::CompressedNormRule& rule = *rule_.by_norms();
  join_slices();
  for (const Measured& measured : measured_) {
    const UnitPass pass{measured.unit, {}, input.gradient_scale, input.groups};
    const Run& run = measured.run;
    const Hyperparameters& hyper = pass.hyper(run);
    const double ratio = rule.taken_ratio(measured.totals, hyper, tools_.counts.numbers(pass.unit, run.parameter));
    tools_.segments.each(pass, run, {Access::update, Access::read},
                         [&](Block, const Segment& segment) { rule.apply(segment, hyper, pass.terms(run), ratio); });
  }
  measured_.clear();
}

}  // namespace deeptide::zero
