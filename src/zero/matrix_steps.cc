// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps of rules that take whole matrices.
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

void ShardedOptimizer::apply_update(const UnitPass& pass, const Run& run, const Tensor& direction) {
  const auto& matrix_rule = static_cast<const MatrixRule&>(rule());
  const Block range = own_part(pass.unit, run.begin, run.end);
  if (range.count == 0) return;
  const sharding::Parameter& p = units_[pass.unit]->parameters()[run.parameter];
  const int64_t rows = p.tensors.front().dim() > 0 ? p.tensors.front().size(0) : 1;
  const optim::MatrixSizes sizes{rows, p.numel / rows};
  const Hyperparameters& hyper = pass.groups.at(run.group);
  const Tensor matrix = direction.narrow(0, p.offset, p.numel).view({sizes.rows, sizes.columns});
  Tensor update = matrix_rule.update_of(matrix, hyper).view({p.numel});
  update = update.narrow(0, states_.begin(pass.unit) + range.begin - p.offset, range.count);
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
