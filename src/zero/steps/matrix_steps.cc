// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes each update where its matrix is whole, of the matrices that concern this rank.
#include "zero/steps/matrix_steps.h"

#include <ATen/ops/cat.h>
#include <c10/util/accumulate.h>

#include "sharding/tensor_slices.h"

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
  Tensor all = all_directions(pass.unit, std::move(own));
  for (const Run& run : runs) {
    if (run.reach == Reach::whole_parameter) apply_update(pass, run, all);
  }
  tools_.pool.put(std::move(all));
}

Tensor MatrixSteps::gathered(Tensor own, const comm::Team& over, const std::string& what) {
  Tensor rows = tools_.pool.take(over.size() * own.numel(), at::kBFloat16);
  comm::Group& group = tools_.teams.of(over);
  auto pending = group.all_gather(rows, own);
  group.wait(pending, {"step", "gathering " + what});
  tools_.pool.put(std::move(own));
  return rows;
}

/// Shapes: own (numel of the unit's states,) -> (ranks along the tensor axis that share the unit * unit's numel,).
Tensor MatrixSteps::all_directions(int index, Tensor own) {
  const sharding::Unit& unit = tools_.states.unit(index);
  const std::string what = "the matrices of unit '" + unit.layout().name + "'";
  if (own.numel() != unit.numel()) own = gathered(std::move(own), unit.shard_over(), what);
  return unit.cut_over() ? gathered(std::move(own), *unit.cut_over(), what + " from the ranks that share them") : own;
}

namespace {

/// Three dimensions are a stack of matrices, such as experts; more are one matrix, as a convolution's: its rows, by all
/// else. Source: DeepSpeed's muon_update.
struct Stack {
  explicit Stack(at::IntArrayRef shape) {
    if (shape.size() == 3) count = shape[0];
    sizes.rows = shape.size() == 3 ? shape[1] : shape.empty() ? 1 : shape[0];
    const int64_t numel = c10::multiply_integers(shape);
    sizes.columns = sizes.rows * count == 0 ? 0 : numel / (sizes.rows * count);
  }

  int64_t count = 1;
  optim::MatrixSizes sizes;
};

/// The directions of whole matrices, by rows: (ranks, *what each has of them) -> whole.
Tensor whole_directions(const sharding::Parameter& p, const Tensor& rows) {
  return p.slice ? sharding::joined(*p.slice, rows) : rows[0];
}

}  // namespace

/// Leaves those matrices of a stack alone in which no element of the range lies.
MatrixSteps::Update MatrixSteps::update_of(const sharding::Unit& unit, const sharding::Parameter& p, Block range,
                                           const Hyperparameters& hyper, const Tensor& directions) const {
  const int64_t ranks = unit.cut_over() ? unit.cut_over()->size() : 1;
  std::vector<int64_t> local = p.tensors.front().sizes().vec();
  int64_t first = 0;  // element of the parameter
  if (local.size() == 3 && !(p.slice && p.slice->dim == 0)) {
    const int64_t each = p.numel / local[0];
    first = range.begin / each * each;
    local[0] = (range.end() - 1) / each + 1 - range.begin / each;
  }
  const int64_t count = c10::multiply_integers(local);
  std::vector<int64_t> rows = local;
  rows.insert(rows.begin(), ranks);
  const Tensor of_unit = directions.view({ranks, unit.numel()});
  const Tensor whole = whole_directions(p, of_unit.narrow(1, p.offset + first, count).view(rows));
  const Stack stack(whole.sizes());
  const Tensor matrices = whole.reshape({stack.count, stack.sizes.rows, stack.sizes.columns});
  std::vector<Tensor> updates;
  for (int64_t m = 0; m < stack.count; ++m) updates.push_back(rule_.update_of(matrices[m], hyper).view({-1}));
  Tensor update = updates.size() == 1 ? updates.front() : at::cat(updates);
  if (p.slice) {
    update = sharding::cut(*p.slice, update.view(whole.sizes()), static_cast<int>(ranks), unit.cut_over()->index());
  }
  return {update.reshape({-1}).narrow(0, range.begin - first, range.count), stack.sizes};
}

void MatrixSteps::apply_update(const UnitPass& pass, const Run& run, const Tensor& directions) {
  const OptimizerStates& states = tools_.states;
  const Block range = states.own_part(pass.unit, run.begin, run.end);
  if (range.count == 0) return;
  const sharding::Unit& unit = states.unit(pass.unit);
  const sharding::Parameter& p = unit.parameters()[run.parameter];
  const Hyperparameters& hyper = pass.hyper(run);
  const Block of_parameter{states.begin(pass.unit) + range.begin - p.offset, range.count};
  Update made = update_of(unit, p, of_parameter, hyper, directions);
  const bool on_host = states.part_on_host(pass.unit) != nullptr;
  if (on_host) made.values = tools_.host_directions.narrow(0, range.begin, range.count).copy_(made.values);
  const Buffer& buffer = states.master(pass.unit);
  const bool narrows = states.has_own_master(pass.unit) && !states.parts(pass.unit).front().leaves;
  const bool returns = narrows && on_host && states.parameters(pass.unit).tier() == tiers::Tier::device;
  const Buffer parameters = narrows && !returns ? states.parameters(pass.unit) : Buffer();
  const Buffer* const both[] = {&buffer, &parameters};
  const auto apply = [&](Block block) {
    const auto master = buffer.lease(block, Access::update);
    const auto narrowed = parameters.defined() ? parameters.lease(block, Access::write) : tiers::Lease();
    const Tensor own = made.values.narrow(0, block.begin - range.begin, block.count);
    Segment segment{.master = master.tensor(), .param = narrowed.tensor()};
    const Segments::Visit visit = [&](Block, const Segment& moved) {
      rule_.apply(moved.master, moved.param, hyper, made.sizes, own);
    };
    returns ? tools_.segments.step_and_return(pass, block, segment, visit) : visit(block, segment);
  };
  for_each_block(std::span<const Buffer* const>(both), range, apply, on_host ? kHostBlockNumel : INT64_MAX);
}

}  // namespace deeptide::zero
