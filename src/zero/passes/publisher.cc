// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Narrows masters, sends what a device has stepped off it, and gathers units.
#include "zero/passes/publisher.h"

namespace deeptide::zero {

using tiers::Access;
using tiers::Block;
using tiers::Buffer;

Publisher::Publisher(const OptimizerStates& states, const StagePolicy& policy,
                     const std::shared_ptr<device::Ledger>& ledger, at::Device device)
    : states_(states), policy_(policy) {
  if (const auto narrowed = states.narrowed_bytes()) out_ = std::make_unique<ParametersOut>(ledger, device, *narrowed);
}

void Publisher::narrow(int unit) {
  if (states_.packed(unit)) return;
  for (const StatePart& part : states_.parts(unit)) {
    if (part.aliased) continue;
    if (part.leaves && part.master.tier() == tiers::Tier::device) {
      send(unit);
      continue;
    }
    const Buffer parameters = states_.parameters(unit, part);
    const Buffer* const both[] = {&part.master, &parameters};
    for_each_block(both, {0, part.numel()}, [&](Block block) {
      const auto master = part.master.lease(block, Access::read);
      parameters.lease(block, Access::write).tensor().copy_(master.tensor());
    });
  }
}

void Publisher::add(int unit, Publication& publication) const {
  if (policy_.shard_optimizer) publication.add(states_.unit(unit));
}

void Publisher::publish(int unit, bool moved, const HostExchange::Step* copies, Publication& publication) {
  const bool waits = leaves_for_files(unit);
  if (moved && !waits) send(unit);
  if (moved && copies) copies->join();
  if (!waits) add(unit, publication);
}

void Publisher::publish_through_files(const std::vector<std::vector<Run>>& runs, Publication& publication) {
  for (int i = 0; i < states_.num_units(); ++i) {
    if (!leaves_for_files(i)) continue;
    if (!runs[i].empty()) send(i);
    add(i, publication);
  }
}

/// Moves what the device has stepped to where it lies.
void Publisher::send(int unit) {
  const StatePart& part = states_.parts(unit).front();
  if (part.leaves) out_->send(part.master.in_place(), states_.parameters(unit), part.begin);
}

/// Whether what a device steps of the unit passes to files.
bool Publisher::leaves_for_files(int unit) const {
  const Buffer& shard = states_.unit(unit).shard();
  return states_.parts(unit).front().leaves && shard.resident_bytes() < shard.nbytes();
}

}  // namespace deeptide::zero
