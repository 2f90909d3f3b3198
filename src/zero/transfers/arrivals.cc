// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lands gathers in the order in which they began, as far as an operator needs.
#include "zero/transfers/arrivals.h"

#include <algorithm>
#include <functional>

#include "base/interrupt.h"
#include "base/log.h"
#include "comm/blocking.h"
#include "device/lane.h"
#include "zero/transfers/unit_gathers.h"

namespace deeptide::zero {

using sharding::Parameter;
using sharding::Unit;
using sharding::Use;

namespace {

std::string text_of(const Unit& unit) {
  return "unit '" + unit.layout().name + "' (first parameter '" + unit.parameters().front().name + "')";
}

}  // namespace

Arrivals::Arrivals(std::vector<Unit*> units, comm::Group& group, at::Device device)
    : units_(std::move(units)), group_(group), device_(device) {
  if (!group_.advances_alone()) helper_ = std::make_unique<comm::BackgroundGathers>(group_, kBytesUnderWay);
  for (Unit* unit : units_) {
    for (Parameter& p : unit->parameters()) {
      entries_.emplace_back(p, *this);
      for (const at::Tensor& tensor : p.tensors) sharding::set_gate_key(tensor, true);
    }
  }
}

Arrivals::~Arrivals() {
  try {
    wait_all();
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        "parameters from " + text_of(*under_way_.front().unit) +
            " on hold values of two steps: the engine ended before the last step's arrived: " + error.what());
    for (const Arrival& arrival : under_way_) arrival.unit->show();
  }
  for (Unit* unit : units_) {
    for (const Parameter& p : unit->parameters()) {
      for (const at::Tensor& tensor : p.tensors) sharding::set_gate_key(tensor, false);
    }
  }
}

void Arrivals::start(Unit& unit) {
  const std::lock_guard lock(mutex_);
  unit.hide();
  if (!watch_) watch_.emplace(*this);
  under_way_.push_back({&unit, gather(unit)});
  sent_bytes_ += static_cast<int64_t>(unit.whole().nbytes()) / group_.size() * (group_.size() - 1);
}

comm::Pending Arrivals::gather(const Unit& unit) {
  if (group_.advances_alone()) return group_.all_gather(unit.whole(), unit.shard().in_place());
  return comm::Pending(helper_->add(unit.whole(), unit.shard().in_place()));
}

void Arrivals::wait_all() {
  comm::run_blocking([&] {
    const std::lock_guard lock(mutex_);
    while (!under_way_.empty()) land_first("step");
  });
}

void Arrivals::acquire(c10::ArrayRef<Use> uses) {
  const auto is_late = [](const Use& use) { return use.parameter->unit->is_hidden(); };
  if (std::none_of(uses.begin(), uses.end(), is_late)) return;
  TORCH_CHECK(::getpid() == process_, "deeptide: parameter '", uses.front().parameter->name,
              "' is used in a process that was forked while the last step's values were on their way: they arrive in "
              "the parent alone. Give the child engine.snapshot(), or set \"overlap_publish\" to false.");
  refuse_in_interrupt_handler("an operator with a parameter that a step has just changed");
  comm::run_blocking([&] {
    const std::lock_guard lock(mutex_);
    for (const Use& use : uses) {
      while (is_late(use)) land_first(sharding::phase());
    }
  });
}

/// A failed wait leaves the unit where it is: whoever needs the unit meets the error.
void Arrivals::land_first(const char* phase) {
  Arrival& first = under_way_.front();
  group_.order_before(device::Lane::current(device_), first.pending,
                      {phase, "waiting for the new values of " + text_of(*first.unit)});
  first.unit->show();
  under_way_.pop_front();
  if (under_way_.empty()) watch_.reset();
}

}  // namespace deeptide::zero
