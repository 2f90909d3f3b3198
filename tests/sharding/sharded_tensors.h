// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Plain tensors bound to sharded units and a residency: stage 3's parameters without an engine around them.
#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/group.h"
#include "sharding/residency.h"
#include "world/failure_board.h"

namespace deeptide::sharding {

struct ShardedTensors {
  /// `name` distinguishes several in one world; parameters are called "p0", "p1", …; a unit holds up to `max_unit`
  /// elements.
  ShardedTensors(const World& world, const std::string& name, std::vector<at::Tensor> given,
                 ResidencyLimits limits = {}, int64_t max_unit = 1,
                 std::chrono::milliseconds timeout = std::chrono::seconds(60), const ShardPlacement& place = {})
      : tensors(std::move(given)),
        board(std::make_shared<world::FailureBoard>(world, name)),
        control(world, comm::Team::whole(world), name + "/control", {.timeout = timeout, .board = board}),
        gathers(world, comm::Team::whole(world), name + "/gathers", {.timeout = timeout, .board = board}) {
    at::NoGradGuard no_grad;
    const auto team = comm::Team::whole(world);
    std::vector<ParameterSpec> specs;
    for (const at::Tensor& t : tensors) {
      specs.push_back({"p" + std::to_string(specs.size()), t.numel(), t.scalar_type(), true, 0});
    }
    std::vector<Unit*> all;
    for (auto& layout : build_layout(specs, {}, {world.size, max_unit})) {
      std::vector<Parameter> members;
      for (const Slot& slot : layout.slots) {
        Parameter p;
        p.name = specs[slot.parameter].name;
        p.tensors = {tensors[slot.parameter]};
        p.offset = slot.offset;
        p.numel = slot.numel;
        members.push_back(std::move(p));
      }
      const int index = static_cast<int>(units.size());
      units.push_back(std::make_unique<Unit>(index, std::move(layout), std::move(members),
                                             UnitPlacement{UnitMemory::sharded, team, team}));
      Unit& unit = *units.back();
      const auto role = device::Role::gathered;
      at::Tensor whole = device::allocate_flat(ledger, role, unit.numel(), unit.layout().dtype, at::kCPU);
      unit.pack(whole);
      unit.adopt(std::move(whole), ledger, place);
      all.push_back(&unit);
    }
    residency = std::make_unique<Residency>(std::move(all), gathers, rounds, ledger, at::kCPU, limits);
  }

  /// Collective: ends the pass.
  std::vector<comm::Close> close(const comm::Close& own = {}, bool ends_pass = true) {
    for (;;) {
      if (auto closes = residency->close_for(std::chrono::milliseconds(50), own, ends_pass)) return *std::move(closes);
    }
  }
  bool rewritten(int unit) const {
    const auto& all = units[unit]->parameters();
    return std::any_of(all.begin(), all.end(), [](const Parameter& p) { return p.rewritten; });
  }
  bool any_pinned() const {
    return std::any_of(units.begin(), units.end(), [](const auto& unit) { return unit->is_pinned(); });
  }

  std::vector<at::Tensor> tensors;
  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  std::shared_ptr<world::FailureBoard> board;
  comm::Group control;
  comm::Rounds rounds{control};
  comm::Group gathers;
  std::vector<std::unique_ptr<Unit>> units;
  std::unique_ptr<Residency> residency;
};

}  // namespace deeptide::sharding
