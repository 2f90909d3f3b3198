// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Leases what a segment needs, block by block, and announces what comes next.
#include "zero/passes/segments.h"

#include <utility>

namespace deeptide::zero {

using at::Tensor;
using optim::Segment;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

void Segments::each(const UnitPass& pass, const Run& run, Block range, SegmentAccess access, const Visit& visit) const {
  if (access.master != Access::read || access.states != Access::read) states_.changing(pass.unit);
  for (const StatePart& part : states_.parts(pass.unit)) {
    const bool is_passed = pass.side != Side::both && part.on_host != (pass.side == Side::host);
    const Block own = part.within(range);
    if (!is_passed && own.count > 0) each_of_part(pass, run, part, own, access, visit);
  }
}

/// `range`: of the part. What lies beside the parameters begins where they do, so its blocks are theirs.
void Segments::each_of_part(const UnitPass& pass, const Run& run, const StatePart& part, Block range,
                            SegmentAccess access, const Visit& visit) const {
  const optim::Rule& rule = states_.rule();
  const Hyperparameters& hyper = pass.hyper(run);
  const PackedMaster* packed = access.takes_packed ? states_.packed(pass.unit) : nullptr;
  const Buffer& master = packed ? packed->low : part.master;
  const size_t num_roles = rule.roles().size();
  // A pass that leaves the masters alone leaves the parameters alone.
  const bool narrows = !part.aliased && !part.leaves && !states_.packed(pass.unit) && access.master != Access::read;
  const bool returns = narrows && part.on_host && states_.parameters(pass.unit).tier() == tiers::Tier::device;
  const Buffer parameters = (narrows && !returns) || packed ? states_.parameters(pass.unit, part) : Buffer();
  // A master of the parameters' type, in memory of its own.
  const bool repeats = !packed && parameters.defined() && parameters.dtype() == master.dtype();
  std::vector<const Buffer*> buffers{&master, &parameters, &pass.gradient.sums};
  for (size_t role = 0; role < num_roles; ++role) {
    if (rule.keeps(role, hyper)) buffers.push_back(&part.states[role]);
  }
  const auto visit_block = [&](Block block) {
    const Block of_unit{part.begin + block.begin, block.count};
    const auto lease = master.lease(block, access.master);
    std::vector<tiers::Lease> leases(num_roles);
    Segment segment{.master = lease.tensor(),
                    .states = std::vector<Tensor>(num_roles),
                    .gradient = {},
                    .param = {},
                    .first = of_unit.begin,
                    .rounding = states_.rounding(pass.unit, of_unit.begin)};
    for (size_t role = 0; role < num_roles; ++role) {
      if (!rule.keeps(role, hyper)) continue;
      leases[role] = part.states[role].lease(block, access.states);
      segment.states[role] = leases[role].tensor();
    }
    prefetch_after(pass, part, block);
    tiers::Lease narrowed, summed;
    if (pass.gradient.defined()) {
      const Block of_gradient{block.begin - pass.gradient_begin, block.count};
      segment.gradient = !part.on_host           ? pass.gradient.part(of_gradient, summed)
                         : pass.gradient.on_host ? pass.gradient.on_host->read(block)
                                                 : pass.copies->gradient(pass.unit, block);
    }
    if (parameters.defined()) narrowed = parameters.lease(block, packed ? access.master : Access::write);
    segment.param = narrowed.tensor();
    if (packed) {
      segment.low = std::exchange(segment.master, std::exchange(segment.param, Tensor()));
      segment.halfway = packed->halfway.get();
    }
    if (returns) return step_and_return(pass, of_unit, segment, visit);
    if (repeats) segment.param = Tensor();
    visit(of_unit, segment);
    if (repeats) narrowed.tensor().copy_(segment.master);
  };
  const int64_t most = part.on_host ? kHostBlockNumel : INT64_MAX;
  for_each_block(std::span<const Buffer* const>(buffers), range, visit_block, most);
}

void Segments::step_and_return(const UnitPass& pass, Block block, Segment& segment, const Visit& visit) const {
  const Tensor target = states_.parameters(pass.unit).in_place().narrow(0, block.begin, block.count);
  const Tensor values = pass.copies->parameters(block.count, target.scalar_type());
  const bool narrow = target.scalar_type() != segment.master.scalar_type();
  if (narrow) segment.param = values;
  visit(block, segment);
  if (!narrow) values.copy_(segment.master);  // where the next step may not reach it before it is copied
  pass.copies->send(values, target);
}

/// Announces what a step reads next: the blocks behind `block`, or the first ones of the next unit.
void Segments::prefetch_after(const UnitPass& pass, const StatePart& part, Block block) const {
  if (pass.side == Side::device) return;  // what it steps is there
  int unit = pass.unit;
  int64_t next = block.begin + block.count;
  const StatePart* holds_next = &part;
  if (next >= part.numel()) {
    next = 0;
    if (++unit == states_.num_units()) return;
    holds_next = &states_.parts(unit).back();
  }
  const auto announce = [&](const Buffer& buffer) {
    if (buffer.defined() && next < buffer.numel()) buffer.prefetch({next, 1});
  };
  announce(holds_next->master);
  if (pass.reducer) pass.reducer->prefetch(unit, holds_next->begin + next);
  // A block of 16 bits takes as many bytes as one of states, so a step writes it in parts, which keep the rest.
  const bool writes_parts = !holds_next->master.in_place().defined() || pass.copies;
  if (!holds_next->aliased && writes_parts) announce(states_.parameters(unit, *holds_next));
  for (const Buffer& state : holds_next->states) announce(state);
}

}  // namespace deeptide::zero
