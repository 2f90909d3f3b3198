// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// In which types and places masters and states lie, from the layout of units alone.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "optim/rules/rule.h"

namespace deeptide::zero {

/// Twin-Flow: a device and its host share a unit at a multiple of this. Units: elements. 256 KiB of fp32; a divisor of
/// every block that is moved.
inline constexpr int64_t kSplitNumel = int64_t{1} << 16;

/// Types of masters and states that are not fp32, and where they lie.
struct StateTypes {
  bool rounded_masters = false;  // units of 16 bits have no fp32 master: their parameters are their masters
  bool rounded_moments = false;  // states have their unit's type; needs rounded masters
  bool packed_masters = false;   // masters of bf16 units share their upper half with the parameters
  std::optional<uint64_t> moments_seed = {};  // states are bf16, rounded stochastically by random bits from this seed
  /// By unit: how many of a device's elements it steps itself, the first ones. Masters and states of the others lie off
  /// it, where the host steps them: in fp32, too, these have masters of their own. Empty: the host steps none.
  std::vector<int64_t> on_device = {};
  /// By unit: elements in memory of what is placed of its master (0) and of its state of each role (1 + role); the
  /// others are in files. Empty: all are in memory.
  std::vector<std::vector<int64_t>> in_memory = {};
  bool gradients_leave = false;  // to the host, by the reducer: those of what it steps
  bool lends_masters = false;    // to the caller's optimizer: a device's copies may not share them

  bool uses_host() const { return !on_device.empty(); }
  /// Elements of a unit of `numel` that are stepped on the device of its parameters.
  int64_t on_device_of(size_t unit, int64_t numel) const { return uses_host() ? on_device.at(unit) : numel; }
  int64_t in_memory_of(size_t unit, size_t state, int64_t numel) const {
    return in_memory.empty() ? numel : in_memory.at(unit).at(state);
  }
  /// Whether what is stepped lies where the parameters do, so that their memory may be part of a master.
  bool steps_beside(bool on_host, bool off_device) const {
    return on_host == off_device && !(off_device && lends_masters);
  }
  bool aliases(at::ScalarType unit, bool beside) const { return beside && (unit == at::kFloat || rounded_masters); }
  /// The type of masters in memory of their own.
  at::ScalarType of_masters(at::ScalarType unit) const { return rounded_masters ? unit : at::kFloat; }
  bool packs(at::ScalarType unit, bool beside) const { return beside && unit == at::kBFloat16 && packed_masters; }
  at::ScalarType of_states(at::ScalarType unit) const {
    if (moments_seed) return at::kBFloat16;
    return rounded_moments ? unit : at::kFloat;
  }
};

/// A unit whose states are to be forecast.
struct UnitForecast {
  int64_t numel = 0;        // that this rank steps
  int64_t whole_numel = 0;  // of all ranks
  at::ScalarType dtype = at::kFloat;
  std::set<int> groups;     // that its parameters are in
  int cut_over = 1;         // the size of Unit::cut_over
  bool off_device = false;  // as lies_off_device
};
/// A state to be placed. Units: elements.
struct StateForecast {
  size_t unit = 0;   // by position
  size_t state = 0;  // as in StateTypes::in_memory
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  bool on_host = false;   // of a device
  bool kept = true;       // else no group needs it yet
  int64_t in_memory = 0;  // the others are in files

  int64_t item_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t nbytes() const { return numel * item_bytes(); }
};
/// Each state that OptimizerStates places, in that order, then those that it would place under other hyper-parameters.
/// All are in memory.
std::vector<StateForecast> forecast(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                                    const std::vector<Hyperparameters>& groups, const StateTypes& types);
/// Sends a share of the bytes on that side to files: of those on a device's host, or of those beside the parameters.
void send_to_files(std::vector<StateForecast>& states, double share, bool on_host);
/// Bytes of those that are kept.
int64_t total_bytes(const std::vector<StateForecast>& states);
/// Bytes of those that lie on the host, or of those beside the parameters.
int64_t total_bytes(const std::vector<StateForecast>& states, bool on_host);
/// The most elements of a unit that the host steps.
int64_t largest_on_host(const std::vector<UnitForecast>& units, const StateTypes& types);
/// Equals OptimizerStates::largest_of_matrices.
int64_t largest_of_matrices(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                            const std::vector<Hyperparameters>& groups);
/// Equals OptimizerStates::narrowed_bytes; absent: the device steps no parameters that lie off it.
std::optional<int64_t> narrowed_bytes(const std::vector<UnitForecast>& units, const StateTypes& types);

}  // namespace deeptide::zero
