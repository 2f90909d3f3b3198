// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules that take whole matrices.
#include <ATen/ops/cat.h>

#include <vector>

#include "zero/sharded_optimizer.h"

namespace deeptide::zero {

using at::Tensor;
using optim::MatrixRule;
using optim::Reach;
using optim::Segment;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

/// Each rank makes its slice of the unit's directions, then the updates of the matrices in which its slice lies. Where
/// the host steps what a device trains, the device still makes the products.
void ShardedOptimizer::step_matrices(const UnitPass& pass, const std::vector<Run>& runs) {
  const bool on_host = states_.part_on_host(pass.unit) != nullptr;
  if (on_host && pass.side == Side::device) return;
  const auto& matrix_rule = static_cast<const MatrixRule&>(rule());
  Tensor own = pool_.take(states_.master(pass.unit).numel(), at::kBFloat16);
  const Tensor directions = on_host ? host_directions_.narrow(0, 0, own.numel()) : own;
  for (const Run& run : runs) {
    if (run.reach != Reach::whole_parameter) continue;
    const Block range = own_part(pass.unit, run.begin, run.end);
    each_segment(pass, run, range, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
      matrix_rule.direct(segment, pass.groups.at(run.group), pass.terms(run),
                         directions.narrow(0, block.begin, block.count));
    });
  }
  if (on_host) own.copy_(directions);
  Tensor whole = whole_direction(pass.unit, std::move(own));
  for (const Run& run : runs) {
    if (run.reach == Reach::whole_parameter) apply_update(pass, run, whole);
  }
  pool_.put(std::move(whole));
}

Tensor ShardedOptimizer::whole_direction(int unit, Tensor own) {
  if (own.numel() == units_[unit]->numel()) return own;
  Tensor whole = pool_.take(units_[unit]->numel(), at::kBFloat16);
  auto pending = group_.all_gather(whole, own);
  group_.wait(pending, {"step", "gathering the matrices of unit '" + units_[unit]->layout().name + "'"});
  pool_.put(std::move(own));
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

void ShardedOptimizer::apply_update(const UnitPass& pass, const Run& run, const Tensor& direction) {
  const auto& matrix_rule = static_cast<const MatrixRule&>(rule());
  const Block range = own_part(pass.unit, run.begin, run.end);
  if (range.count == 0) return;
  const sharding::Parameter& p = units_[pass.unit]->parameters()[run.parameter];
  const Stack stack(p.tensors.front());
  const optim::MatrixSizes sizes = stack.sizes;
  const Hyperparameters& hyper = pass.groups.at(run.group);
  // The matrices in which this range lies, and no others.
  const int64_t begin = states_.begin(pass.unit) + range.begin - p.offset;
  const int64_t first = begin / stack.numel(), last = (begin + range.count - 1) / stack.numel();
  std::vector<Tensor> updates;
  for (int64_t m = first; m <= last; ++m) {
    const Tensor matrix = direction.narrow(0, p.offset + m * stack.numel(), stack.numel());
    updates.push_back(matrix_rule.update_of(matrix.view({sizes.rows, sizes.columns}), hyper).view({stack.numel()}));
  }
  Tensor update = updates.size() == 1 ? updates.front() : at::cat(updates);
  update = update.narrow(0, begin - first * stack.numel(), range.count);
  const bool on_host = states_.part_on_host(pass.unit) != nullptr;
  if (on_host) update = host_directions_.narrow(0, range.begin, range.count).copy_(update);
  const Buffer& buffer = states_.master(pass.unit);
  const bool narrows = states_.has_own_master(pass.unit) && !states_.parts(pass.unit).front().leaves;
  const bool returns = narrows && on_host && states_.parameters(pass.unit).tier() == tiers::Tier::device;
  const Buffer parameters = narrows && !returns ? states_.parameters(pass.unit) : Buffer();
  const Buffer* const both[] = {&buffer, &parameters};
  const auto apply = [&](Block block) {
    const auto master = buffer.lease(block, Access::update);
    const auto narrowed = parameters.defined() ? parameters.lease(block, Access::write) : tiers::Lease();
    const Tensor own = update.narrow(0, block.begin - range.begin, block.count);
    Segment segment{.master = master.tensor(), .param = narrowed.tensor()};
    const Visit visit = [&](Block, const Segment& moved) {
      matrix_rule.apply(moved.master, moved.param, hyper, sizes, own);
    };
    returns ? step_and_return(pass, block, segment, visit) : visit(block, segment);
  };
  for_each_block(std::span<const Buffer* const>(both), range, apply, on_host ? kHostBlockNumel : INT64_MAX);
}

}  // namespace deeptide::zero
