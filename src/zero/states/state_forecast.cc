// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts units and places states as OptimizerStates does, without their memory.
#include "zero/states/state_forecast.h"

#include <algorithm>

#include "tiers/split.h"
#include "tiers/swap_file.h"

namespace deeptide::zero {

std::vector<StateForecast> forecast(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                                    const std::vector<Hyperparameters>& groups, const StateTypes& types) {
  std::vector<StateForecast> states;
  const auto add = [&](size_t unit, size_t state, int64_t numel, at::ScalarType dtype, bool on_host, bool kept) {
    if (numel > 0) states.push_back({unit, state, numel, dtype, on_host, kept, numel});
  };
  std::vector<int64_t> on_device;
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitForecast& unit = units[i];
    on_device.push_back(types.on_device_of(i, unit.numel));
    const auto add_master = [&](int64_t numel, bool on_host) {
      const bool beside = types.steps_beside(on_host, unit.off_device);
      const auto master = types.packs(unit.dtype, beside) ? at::kShort : types.of_masters(unit.dtype);
      if (!types.aliases(unit.dtype, beside)) add(i, 0, numel, master, on_host, true);
    };
    add_master(on_device.back(), false);
    add_master(unit.numel - on_device.back(), true);
  }
  std::vector<std::vector<bool>> placed(units.size(), std::vector<bool>(rule.roles().size(), false));
  const auto add_state = [&](size_t group, size_t role, bool kept) {
    for (size_t i = 0; i < units.size(); ++i) {
      if (placed[i][role] || !units[i].groups.contains(static_cast<int>(group))) continue;
      placed[i][role] = true;
      add(i, 1 + role, on_device[i], types.of_states(units[i].dtype), false, kept);
      add(i, 1 + role, units[i].numel - on_device[i], types.of_states(units[i].dtype), true, kept);
    }
  };
  for (const bool kept : {true, false}) {
    for (size_t group = 0; group < groups.size(); ++group) {
      for (size_t role = 0; role < rule.roles().size(); ++role) {
        if (rule.keeps(role, groups[group]) == kept) add_state(group, role, kept);
      }
    }
  }
  return states;
}

void send_to_files(std::vector<StateForecast>& states, double share, bool on_host) {
  std::vector<StateForecast*> cut;
  std::vector<int64_t> sizes;
  for (StateForecast& state : states) {
    if (state.on_host != on_host) continue;
    cut.push_back(&state);
    sizes.push_back(state.nbytes());
  }
  const std::vector<int64_t> staying = tiers::split(sizes, share, tiers::kSwapBlockBytes);
  for (size_t i = 0; i < cut.size(); ++i) cut[i]->in_memory = staying[i] / cut[i]->item_bytes();
}

int64_t total_bytes(const std::vector<StateForecast>& states) {
  return total_bytes(states, false) + total_bytes(states, true);
}

int64_t total_bytes(const std::vector<StateForecast>& states, bool on_host) {
  int64_t bytes = 0;
  for (const StateForecast& state : states) bytes += state.kept && state.on_host == on_host ? state.nbytes() : 0;
  return bytes;
}

int64_t largest_on_host(const std::vector<UnitForecast>& units, const StateTypes& types) {
  int64_t largest = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    largest = std::max(largest, units[i].numel - types.on_device_of(i, units[i].numel));
  }
  return largest;
}

int64_t largest_of_matrices(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                            const std::vector<Hyperparameters>& groups) {
  int64_t largest = 0;
  for (const UnitForecast& unit : units) {
    const bool has_matrices = std::any_of(unit.groups.begin(), unit.groups.end(), [&](int group) {
      return rule.reach(groups.at(group)) == optim::Reach::whole_parameter;
    });
    if (has_matrices) largest = std::max(largest, unit.numel);
  }
  return largest;
}

std::optional<int64_t> narrowed_bytes(const std::vector<UnitForecast>& units, const StateTypes& types) {
  std::optional<int64_t> largest;
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitForecast& unit = units[i];
    const int64_t on_device = types.on_device_of(i, unit.numel);
    if (!unit.off_device || on_device == 0) continue;
    const bool narrows = types.of_masters(unit.dtype) != unit.dtype;
    const int64_t bytes = narrows ? on_device * static_cast<int64_t>(c10::elementSize(unit.dtype)) : 0;
    largest = std::max(largest.value_or(0), bytes);
  }
  return largest;
}

}  // namespace deeptide::zero
