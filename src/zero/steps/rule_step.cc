// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One kernel call per segment of each shard, and what whole parameters need in between.
#include "zero/steps/rule_step.h"

#include <algorithm>

#include "zero/steps/matrix_steps.h"

namespace deeptide::zero {

using at::Tensor;
using comm::OwnRow;
using optim::Reach;
using optim::Segment;
using tiers::Access;
using tiers::Block;

namespace {

/// Sums of a device lie in its memory, in one type.
const Tensor& sum_on_device(const gradients::UnitGradient& gradient) { return gradient.rows.rows.at(0); }

bool are_elementwise(const std::vector<Run>& runs) {
  return std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.reach == Reach::elementwise; });
}

/// Visits the units of which some parameter moves.
template <typename Visit>
void each_moving(const std::vector<std::vector<Run>>& runs, Visit visit) {
  for (size_t unit = 0; unit < runs.size(); ++unit) {
    if (!runs[unit].empty()) visit(static_cast<int>(unit));
  }
}

}  // namespace

RuleStep::RuleStep(const StepTools& tools, const gradients::Reducer& reducer, const StepInput& input,
                   Publication& publication)
    : tools_(tools),
      reducer_(reducer),
      input_(input),
      publication_(publication),
      gathers_(tools.states, tools.teams, tools.pool, reducer) {
  if (tools.rule().norms()) norms_.emplace(tools);
  for (int i = 0; i < tools.states.num_units(); ++i) {
    tools.states.refresh_masters(i);
    runs_.push_back(tools.counts.count_step(i, input.active, input.groups));
  }
  if (tools.exchange) copies_.emplace(*tools.exchange);
}

void RuleStep::run() {
  if (copies_ && !tools_.gathers_gradients()) issue_for_device();
  for (int i = 0; i < tools_.states.num_units(); ++i) step_unit(i);
  if (norms_) second_pass();
  tools_.publisher.publish_through_files(runs_, publication_);
}

UnitPass RuleStep::pass_of(int unit, gradients::UnitGradient gradient, Side side) {
  UnitPass pass{unit, std::move(gradient), input_.gradient_scale, input_.groups, nullptr, copies(), side};
  if (!tools_.gathers_gradients()) pass.reducer = &reducer_;
  return pass;
}

/// Announced in the order of the host's steps.
void RuleStep::announce(int unit, const Tensor& gradient) {
  const StatePart* part = tools_.states.part_on_host(unit);
  if (part) copies_->announce(unit, gradient.narrow(0, part->begin, part->numel()));
}

void RuleStep::issue_for_device() {
  if (!reducer_.leave()) {
    each_moving(runs_, [&](int unit) { announce(unit, sum_on_device(reducer_.gradient(unit))); });
  }
  each_moving(runs_, [&](int unit) { first_pass(pass_of(unit, reducer_.gradient(unit), Side::device)); });
}

/// Starts to gather this unit's gradient, and as many others as there is room for.
void RuleStep::gather_ahead(int unit) {
  for (; next_to_gather_ < tools_.states.num_units(); ++next_to_gather_) {
    if (next_to_gather_ > unit && !gathers_.has_room()) return;
    const std::vector<Run>& runs = runs_[next_to_gather_];
    if (!runs.empty())
      gathers_.start(next_to_gather_, copies_ || !are_elementwise(runs) ? OwnRow::copied : OwnRow::left);
  }
}

void RuleStep::step_unit(int unit) {
  if (runs_[unit].empty()) return publish(unit);
  const bool gathers = tools_.gathers_gradients();
  if (gathers) gather_ahead(unit);
  if (gathers && !copies_ && are_elementwise(runs_[unit])) return step_own_first(unit);
  gradients::UnitGradient gradient = gathers   ? gathers_.wait_first()
                                     : copies_ ? reducer_.gradient(unit)
                                               : reducer_.gradient_on_device(unit);
  if (copies_ && gathers) {
    announce(unit, sum_on_device(gradient));
    first_pass(pass_of(unit, gradient, Side::device));
  }
  first_pass(pass_of(unit, gradient, copies_ ? Side::host : Side::both));
  publish(unit);
  if (gathers) tools_.pool.put(std::move(gradient.rows.rows[0]));
}

/// An elementwise step where each rank steps all: this rank's own shard while the others' sums are on their way.
void RuleStep::step_own_first(int index) {
  const sharding::Unit& unit = tools_.states.unit(index);
  const Block shard{unit.shard_begin(), unit.layout().shard};
  UnitPass pass = pass_of(index, reducer_.gradient(index), Side::both);
  pass.gradient_begin = shard.begin;
  const auto step_part = [&](Block elements) {
    pass.elements = elements;
    first_pass(pass);
  };
  step_part(shard);
  pass.gradient = gathers_.wait_first();
  pass.gradient_begin = 0;
  step_part({0, shard.begin});
  step_part({shard.end(), unit.numel() - shard.end()});
  tools_.pool.put(std::move(pass.gradient.rows.rows[0]));
}

/// All of an elementwise step; of others what precedes the exchange over whole parameters. Matrices are exchanged here,
/// unit by unit; norms once for the model.
void RuleStep::first_pass(const UnitPass& pass) {
  bool has_matrices = false;
  for (const Run& run : runs_[pass.unit]) {
    if (run.reach == Reach::elementwise) step_elements(pass, run);
    if (run.reach == Reach::parameter_norms) norms_->measure(pass, run);
    has_matrices = has_matrices || run.reach == Reach::whole_parameter;
  }
  if (has_matrices) MatrixSteps(tools_).step(pass, runs_[pass.unit]);
}

void RuleStep::step_elements(const UnitPass& pass, const Run& run) const {
  const int64_t begin = std::max(run.begin, pass.elements.begin), end = std::min(run.end, pass.elements.end());
  const Block range = begin < end ? tools_.states.own_part(pass.unit, begin, end) : Block();
  const SegmentAccess access{Access::update, Access::update, /*takes_packed=*/true};
  tools_.segments.each(pass, run, range, access, [&](Block, const Segment& segment) {
    tools_.rule().step(segment, pass.hyper(run), pass.terms(run));
  });
}

void RuleStep::second_pass() {
  norms_->exchange(runs_, input_.groups);
  const auto pass_over = [&](int unit, Side side) {
    norms_->apply({unit, {}, input_.gradient_scale, input_.groups, nullptr, copies(), side}, runs_[unit]);
  };
  if (copies_) each_moving(runs_, [&](int unit) { pass_over(unit, Side::device); });
  for (int i = 0; i < tools_.states.num_units(); ++i) {
    pass_over(i, copies_ ? Side::host : Side::both);
    tools_.publisher.publish(i, !runs_[i].empty(), copies(), publication_);
  }
}

/// A rule of norms has yet to move the masters.
void RuleStep::publish(int unit) {
  const bool moved = !runs_[unit].empty();
  if (!norms_) return tools_.publisher.publish(unit, moved, copies(), publication_);
  if (moved && copies_) copies_->join();
}

}  // namespace deeptide::zero
