// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps a queue of all-gathers.
#include "zero/transfers/unit_gathers.h"

#include "zero/transfers/arrivals.h"

namespace deeptide::zero {

using at::Tensor;

UnitGathers::~UnitGathers() {
  for (Gather& gather : under_way_) {
    if (gather.output.is_cpu()) continue;
    try {
      gather.group->order_before(device::Lane::current(gather.output.device()), gather.pending, {"step", verb_});
    } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
    }
  }
}

void UnitGathers::start(const std::string& unit, Tensor output, Tensor input, comm::OwnRow own, comm::Group* over) {
  comm::Group& group = over ? *over : group_;
  auto pending = group.all_gather(output, input, own);
  bytes_ += static_cast<int64_t>(output.nbytes());
  under_way_.push_back({unit, std::move(output), std::move(input), std::move(pending), &group});
}

void UnitGathers::add_done(Tensor output) {
  bytes_ += static_cast<int64_t>(output.nbytes());
  under_way_.push_back({"", std::move(output), {}, {}, &group_});
}

Tensor UnitGathers::wait_first() {
  Gather& first = under_way_.front();
  first.group->wait(first.pending, {"step", std::string(verb_) + " unit '" + first.unit + "'"});
  Tensor output = std::move(first.output);
  bytes_ -= static_cast<int64_t>(output.nbytes());
  under_way_.pop_front();
  return output;
}

void UnitGathers::wait_all() {
  while (!under_way_.empty()) wait_first();
}

void Publication::add(sharding::Unit& unit) {
  if (unit.memory() == sharding::UnitMemory::shared) shared_ = true;
  if (unit.memory() == sharding::UnitMemory::sharded && residency_) residency_->note_stepped(unit);
  if (unit.memory() != sharding::UnitMemory::whole) return;
  if (arrivals_) return arrivals_->start(unit);
  while (!gathers_.has_room()) gathers_.wait_first();
  gathers_.start(unit.layout().name, unit.whole(), unit.shard().in_place(), comm::OwnRow::copied,
                 &over_.of(unit.shard_over()));
}

void Publication::finish() {
  gathers_.wait_all();
  if (shared_) over_.whole().barrier({"step", "waiting for all ranks to have stepped their shards"});
}

}  // namespace deeptide::zero
