// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes each update where its matrix is whole, of the matrices that concern this rank.
#include "zero/steps/matrix_steps.h"

#include <ATen/ops/cat.h>

namespace deeptide::zero {

using at::Tensor;
using optim::Reach;
using optim::Segment;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

void MatrixSteps::step(const UnitPass& pass, const std::vector<Run>& runs) {
  const OptimizerStates& states = tools_.states;
  const bool on_host = states.part_on_host(pass.unit) != nullptr;
  if (on_host && pass.side == Side::device) return;
  Tensor own = tools_.pool.take(states.master(pass.unit).numel(), at::kBFloat16);
  const Tensor directions = on_host ? tools_.host_directions.narrow(0, 0, own.numel()) : own;
  for (const Run& run : runs) {
    if (run.reach != Reach::whole_parameter) continue;
    tools_.segments.each(pass, run, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
      rule_.direct(segment, pass.hyper(run), pass.terms(run), directions.narrow(0, block.begin, block.count));
    });
  }
  if (on_host) own.copy_(directions);
  Tensor whole = whole_direction(pass.unit, std::move(own));
  for (const Run& run : runs) {
    if (run.reach == Reach::whole_parameter) apply_update(pass, run, whole);
  }
  tools_.pool.put(std::move(whole));
}

Tensor MatrixSteps::whole_direction(int index, Tensor own) {
  const sharding::Unit& unit = tools_.states.unit(index);
  if (own.numel() == unit.numel()) return own;
  Tensor whole = tools_.pool.take(unit.numel(), at::kBFloat16);
  auto pending = tools_.group().all_gather(whole, own);
  tools_.group().wait(pending, {"step", "gathering the matrices of unit '" + unit.layout().name + "'"});
  tools_.pool.put(std::move(own));
  return whole;
}

namespace {

/// Three dimensions are a stack of matrices, such as experts; more are one matrix, as a convolution's: its rows, by all
/// else. Source: DeepSpeed's muon_update.
struct Stack {
  explicit Stack(const Tensor& parameter) {
    const auto shape = parameter.sizes();
    if (shape.size() == 3) count = shape[0];
    sizes.rows = count > 1 || shape.size() == 3 ? shape[1] : shape.empty() ? 1 : shape[0];
    sizes.columns = sizes.rows * count == 0 ? 0 : parameter.numel() / (sizes.rows * count);
  }
  int64_t numel() const { return sizes.rows * sizes.columns; }

  int64_t count = 1;
  optim::MatrixSizes sizes;
};

}  // namespace

void MatrixSteps::apply_update(const UnitPass& pass, const Run& run, const Tensor& direction) {
  const OptimizerStates& states = tools_.states;
  const Block range = states.own_part(pass.unit, run.begin, run.end);
  if (range.count == 0) return;
  const sharding::Parameter& p = states.unit(pass.unit).parameters()[run.parameter];
  const Stack stack(p.tensors.front());
  const optim::MatrixSizes sizes = stack.sizes;
  const Hyperparameters& hyper = pass.hyper(run);
  // The matrices in which this range lies, and no others.
  const int64_t begin = states.begin(pass.unit) + range.begin - p.offset;
  const int64_t first = begin / stack.numel(), last = (begin + range.count - 1) / stack.numel();
  std::vector<Tensor> updates;
  for (int64_t m = first; m <= last; ++m) {
    const Tensor matrix = direction.narrow(0, p.offset + m * stack.numel(), stack.numel());
    updates.push_back(rule_.update_of(matrix.view({sizes.rows, sizes.columns}), hyper).view({stack.numel()}));
  }
  Tensor update = updates.size() == 1 ? updates.front() : at::cat(updates);
  update = update.narrow(0, begin - first * stack.numel(), range.count);
  const bool on_host = states.part_on_host(pass.unit) != nullptr;
  if (on_host) update = tools_.host_directions.narrow(0, range.begin, range.count).copy_(update);
  const Buffer& buffer = states.master(pass.unit);
  const bool narrows = states.has_own_master(pass.unit) && !states.parts(pass.unit).front().leaves;
  const bool returns = narrows && on_host && states.parameters(pass.unit).tier() == tiers::Tier::device;
  const Buffer parameters = narrows && !returns ? states.parameters(pass.unit) : Buffer();
  const Buffer* const both[] = {&buffer, &parameters};
  const auto apply = [&](Block block) {
    const auto master = buffer.lease(block, Access::update);
    const auto narrowed = parameters.defined() ? parameters.lease(block, Access::write) : tiers::Lease();
    const Tensor own = update.narrow(0, block.begin - range.begin, block.count);
    Segment segment{.master = master.tensor(), .param = narrowed.tensor()};
    const Segments::Visit visit = [&](Block, const Segment& moved) {
      rule_.apply(moved.master, moved.param, hyper, sizes, own);
    };
    returns ? tools_.segments.step_and_return(pass, block, segment, visit) : visit(block, segment);
  };
  for_each_block(std::span<const Buffer* const>(both), range, apply, on_host ? kHostBlockNumel : INT64_MAX);
}

}  // namespace deeptide::zero
