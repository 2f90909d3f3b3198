// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Master weights and an optimizer's states, unit by unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "optim/rules/rule.h"
#include "sharding/unit.h"
#include "tiers/buffer.h"
#include "zero/states/packed_master.h"
#include "zero/states/policy.h"
#include "zero/states/state_forecast.h"

namespace deeptide::zero {

/// A flat state of a unit: "master", or one of the rule's roles. Covers the shard, or, at stage 0, the unit.
struct UnitStateBuffer {
  std::string role;
  tiers::Buffer data;
};

/// Makes the zeroed buffer (numel,) of a state or a master: where states lie is its choice. If in files, then the first
/// `resident` elements are in memory.
using StatePlacement = std::function<tiers::Buffer(int64_t numel, int64_t resident, at::ScalarType dtype)>;

/// Whether the unit's shard lies on the host of a device that trains it, or in files.
bool lies_off_device(const sharding::Unit& unit);

/// Consecutive elements of a unit's states, which lie in one place and are stepped there. If the host steps a share of
/// a device's elements, a unit has up to two parts, and the device's comes first.
struct StatePart {
  int64_t begin = 0;  // of the unit's states
  int64_t count = 0;
  bool on_host = false;
  bool aliased = false;               // the master is the parameters' own memory
  bool leaves = false;                // a device steps it, and its parameters, which lie off the device, follow
  tiers::Buffer master;               // (numel,)
  std::vector<tiers::Buffer> states;  // by the rule's roles; undefined: not kept

  int64_t numel() const { return count; }
  /// The elements of the unit's states within this part, counted from its beginning.
  tiers::Block within(tiers::Block range) const {
    const int64_t first = std::clamp<int64_t>(range.begin - begin, 0, numel());
    return {first, std::clamp<int64_t>(range.begin + range.count - begin, first, numel()) - first};
  }
};

/// A state of one parameter: its name, and the role.
using StateName = std::pair<std::string, std::string>;

class OptimizerStates {
 public:
  /// Masters of what is not fp32 start as the parameters' values. Rounded ones need a rule of elementwise reach.
  /// `beside`: places what a device keeps if `place` has a share of its states on the host.
  OptimizerStates(std::vector<sharding::Unit*> units, const optim::Rule& rule,
                  const std::vector<Hyperparameters>& groups, const StagePolicy& policy, StatePlacement place,
                  StateTypes types = {}, StatePlacement beside = {});

  int num_units() const { return static_cast<int>(units_.size()); }
  sharding::Unit& unit(int unit) const { return *units_[unit]; }
  const std::vector<sharding::Unit*>& units() const { return units_; }
  const optim::Rule& rule() const { return rule_; }

  /// The flat parameters that this rank steps: its shard, or at stage 0 the whole unit.
  tiers::Buffer parameters(int unit) const;
  /// The part of them that has these states.
  tiers::Buffer parameters(int unit, const StatePart& part) const;
  const std::vector<StatePart>& parts(int unit) const { return units_states_[unit].parts; }
  /// The part of a unit that the host steps; null: none.
  const StatePart* part_on_host(int unit) const;
  /// The most elements of a unit that the host steps.
  int64_t largest_on_host() const;
  /// The most elements of a unit whose step takes matrices whole.
  int64_t largest_of_matrices(const std::vector<Hyperparameters>& groups) const;
  /// For parameters that a device steps and that lie off it: bytes of the largest part that is narrowed on its way
  /// there: 0 if none is; absent if there are none.
  std::optional<int64_t> narrowed_bytes() const;
  /// Elements whose states lie in this rank's memory or files, and those of them that the host steps for a device.
  int64_t numel() const;
  int64_t numel_on_host() const;
  /// The first element with states in the unit: 0 at stage 0, else the shard's beginning. Units: elements.
  int64_t begin(int unit) const;
  int64_t end(int unit) const { return begin(unit) + master(unit).numel(); }
  /// The elements within [first, last) of the unit that have states here, counted from the states' beginning.
  tiers::Block own_part(int unit, int64_t first, int64_t last) const;
  const tiers::Buffer& master(int unit) const { return units_states_[unit].master; }
  /// Whether a share of them is stepped on the host, the parameters being a device's.
  bool use_host() const { return types_.uses_host(); }
  /// Whether all of the master is the parameters' own memory, as in fp32 and where masters are rounded.
  bool is_aliased(int unit) const;
  /// The bits that a packed master keeps beside the parameters; null: the master is not packed.
  const PackedMaster* packed(int unit) const {
    return units_states_[unit].packed ? &*units_states_[unit].packed : nullptr;
  }
  /// Whether parameters must follow from a master in memory of its own.
  bool has_own_master(int unit) const { return !is_aliased(unit) && packed(unit) == nullptr; }
  /// How a step rounds states of these elements, counted from `begin`; absent: to nearest, where they have 16 bits.
  std::optional<optim::StochasticRounding> rounding(int unit, int64_t element) const;
  /// Undefined: no parameter of the unit needs it.
  const tiers::Buffer& state(int unit, size_t role) const { return units_states_[unit].states[role]; }
  /// The master, then the states that some parameter of the unit needs.
  std::vector<UnitStateBuffer> buffers(int unit) const;
  /// Bytes of all units on this rank.
  int64_t predicted_bytes() const;
  /// The part of that which the host has for a device.
  int64_t host_bytes() const;

  /// Allocates, as zeros, the states that these groups need and have not needed yet.
  void keep(const std::vector<Hyperparameters>& groups);
  /// Whether a trained parameter has the master or state of this role.
  bool has(const sharding::Parameter& p, const std::string& role) const;
  /// The states that parameters do not have, though the rule knows them.
  std::set<StateName> unkept() const;
  /// Sets these states to zero, as before the first step.
  void zero(const std::set<StateName>& states);

  /// Masters of parameters that others wrote (Parameter::rewritten) follow from them, element by element.
  void refresh_masters(int unit);
  void refresh_masters();

  /// Move all masters that are memory of their own, or all other states, to buffers that `place` makes. Each is
  /// complete wherever it lies if this fails midway. `from_host`: also what lies on a device's host. Errors: as
  /// `place`.
  void move_masters(const StatePlacement& place, bool from_host = true);
  void move_moments(const StatePlacement& place, bool from_host = true);
  /// Moves back what was moved.
  void bring_back();
  /// Whether a step has to wait for bring_back: someone has announced that memory is needed for something else.
  bool are_away() const { return away_; }
  void set_away(bool away) { away_ = away; }

  /// From now on `keep` is called, with the unit, before its masters or states change; empty: no more.
  void before_changes(std::function<void(int unit)> keep) { before_changes_ = std::move(keep); }
  /// Must be called before any change of a unit's masters or states.
  void changing(int unit) const {
    if (before_changes_) before_changes_(unit);
  }

 private:
  struct UnitState {
    std::vector<StatePart> parts;
    tiers::Buffer master;                // of all parts
    std::vector<tiers::Buffer> states;   // likewise, by the rule's roles; undefined: not kept
    std::optional<PackedMaster> packed;  // what `master` consists of, beside the parameters
    int64_t first = 0;                   // of the unit, among all elements that are trained, at any world
  };

  void place_masters(int unit);
  tiers::Buffer place(int unit, const StatePart& part, size_t state, at::ScalarType dtype) const;
  void refresh(const StatePart& part, tiers::Block range, const tiers::Buffer& values) const;
  static void join(UnitState& state);
  static int64_t bytes_of(const UnitState& state, const StatePart& part);
  /// Makes the buffer of a part's state, as in StateTypes::in_memory; an undefined one: it stays where it is.
  using PartPlacement =
      std::function<tiers::Buffer(int unit, const StatePart& part, size_t state, at::ScalarType dtype)>;
  static PartPlacement away(const StatePlacement& place, bool from_host);
  void move_masters_to(const PartPlacement& place);
  void move_moments_to(const PartPlacement& place);

  std::vector<sharding::Unit*> units_;
  const optim::Rule& rule_;
  StagePolicy policy_;
  StatePlacement place_, beside_;
  StateTypes types_;
  std::vector<std::vector<bool>> kept_;  // by group, then by the rule's roles
  std::vector<UnitState> units_states_;
  std::function<void(int unit)> before_changes_;
  bool moved_masters_ = false, moved_moments_ = false, moved_from_host_ = false, away_ = false;
};

}  // namespace deeptide::zero
