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

/// Each rank makes its slice of the unit's directions, then the updates of the matrices in which its slice lies.
void ShardedOptimizer::step_matrices(const UnitPass& pass, const std::vector<Run>& runs) {
  const auto& matrix_rule = static_cast<const MatrixRule&>(rule());
  Tensor own = pool_.take(states_.master(pass.unit).numel(), at::kBFloat16);
  for (const Run& run : runs) {
    if (run.reach != Reach::whole_parameter) continue;
    const Block range = own_part(pass.unit, run.begin, run.end);
    each_segment(pass, run, range, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
      matrix_rule.direct(segment, pass.groups.at(run.group), pass.terms(run), own.narrow(0, block.begin, block.count));
    });
  }
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
  const Tensor update = matrix_rule.update_of(matrix, hyper).view({p.numel});
  const Buffer& buffer = states_.master(pass.unit);
  const Buffer parameters = states_.has_own_master(pass.unit) ? states_.parameters(pass.unit) : Buffer();
  const Buffer* const both[] = {&buffer, &parameters};
  for_each_block(both, range, [&](Block block) {
    const auto master = buffer.lease(block, Access::update);
    const auto narrowed = parameters.defined() ? parameters.lease(block, Access::write) : tiers::Lease();
    const int64_t first = states_.begin(pass.unit) + block.begin - p.offset;
    matrix_rule.apply(master.tensor(), narrowed.tensor(), hyper, sizes, update.narrow(0, first, block.count));
  });
}

}  // namespace deeptide::zero
