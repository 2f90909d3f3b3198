// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps a queue of all-gathers.
#include "zero/unit_gathers.h"

#include <algorithm>
#include <numeric>

#include "zero/arrivals.h"

namespace deeptide::zero {

using at::Tensor;

int64_t most_bytes_under_way(const std::vector<int64_t>& sizes) {
  if (sizes.empty()) return 0;
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  return std::min(kBytesUnderWay + largest, std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
}

UnitGathers::~UnitGathers() {
  for (Flight& flight : flights_) {
    if (flight.output.is_cpu()) continue;
    try {
      group_.order_before(device::Lane::current(flight.output.device()), flight.pending, {"step", verb_});
    } catch (const std::exception&) {  // a device or a channel that has failed gives no memory to anybody
    }
  }
}

void UnitGathers::start(const std::string& unit, Tensor output, Tensor input) {
  auto pending = group_.all_gather(output, input);
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
