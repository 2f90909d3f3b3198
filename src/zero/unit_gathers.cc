// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps a queue of all-gathers.
#include "zero/unit_gathers.h"

#include "zero/arrivals.h"

namespace deeptide::zero {

using at::Tensor;

UnitGathers::~UnitGathers() {
  for (Flight& flight : flights_) {
    if (flight.output.is_cpu()) continue;
    try {
      group_.order_before(device::Lane::current(flight.output.device()), flight.pending, {"step", verb_});
    } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
    }
  }
}

void UnitGathers::start(const std::string& unit, Tensor output, Tensor input, comm::OwnRow own) {
  auto pending = group_.all_gather(output, input, own);
  bytes_ += static_cast<int64_t>(output.nbytes());
  flights_.push_back({unit, std::move(output), std::move(input), std::move(pending)});
}

void UnitGathers::add_done(Tensor output) {
  bytes_ += static_cast<int64_t>(output.nbytes());
  flights_.push_back({"", std::move(output), {}, {}});
}

Tensor UnitGathers::wait_first() {
  Flight& first = flights_.front();
  group_.wait(first.pending, {"step", std::string(verb_) + " unit '" + first.unit + "'"});
  Tensor output = std::move(first.output);
  bytes_ -= static_cast<int64_t>(output.nbytes());
  flights_.pop_front();
  return output;
}

void UnitGathers::wait_all() {
  while (!flights_.empty()) wait_first();
}

void Publication::add(sharding::Unit& unit) {
  if (unit.memory() == sharding::UnitMemory::shared) shared_ = true;
  if (unit.memory() == sharding::UnitMemory::sharded && residency_) residency_->note_stepped(unit);
  if (unit.memory() != sharding::UnitMemory::whole) return;
  if (arrivals_) return arrivals_->start(unit);
  while (!gathers_.has_room()) gathers_.wait_first();
  gathers_.start(unit.layout().name, unit.whole(), unit.shard().in_place());
}

void Publication::finish() {
  gathers_.wait_all();
  if (shared_) over_.barrier({"step", "waiting for all ranks to have stepped their shards"});
}

}  // namespace deeptide::zero
