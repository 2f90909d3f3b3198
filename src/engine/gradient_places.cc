// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums go where they are stepped, unless the configuration places them.
#include "engine/gradient_places.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "deeptide/errors.h"
#include "engine/choices.h"
#include "optim/custom_rule.h"
#include "zero/host_split.h"

namespace deeptide::engine {

namespace {

/// Of the gradients of `numel` elements, the share that a device leaves to its host; absent: not given.
std::optional<double> share_of_gradients_on_host(const Config& config, at::Device device, int64_t numel) {
  const PlacementConfig& placement = config.placement();
  if (!placement.gradients || device.is_cpu()) return std::nullopt;
  if (!placement.gradients_on_device) return 0.0;
  const MemoryShare& memory = *placement.gradients_on_device;
  if (numel == 0) return 1.0 - memory.fraction;
  const auto item = static_cast<int64_t>(c10::elementSize(accumulate_type(config)));
  return share_beyond(memory, numel * item, zero::kSplitNumel / 2 * item);
}

/// Errors: ConfigError naming what keeps sums from leaving by a placement of their own.
void check_gradients_leave(const Config& config, const optim::Rule& rule, at::Device device, bool steps_shard,
                           double share, const zero::StateTypes& types) {
  const std::tuple<bool, std::string, std::string> obstacles[] = {
      {!steps_shard, "stage 0, where each rank steps all and gathers the sums on the device",
       "choose a stage from 1 on"},
      {config.runtime().keep_grad, "deeptide.keep_grad, which keeps whole gradients on the device",
       "leave keep_grad out"},
      {!types.uses_host() && dynamic_cast<const optim::CustomRule*>(&rule) != nullptr,
       "an optimizer of your own that steps on the device", "add offload_optimizer"},
      {types.uses_host() && (measures_ratio(config) || std::abs(share - types.host_share) > 1e-9),
       fmt::format("optimizer states of which the host steps {:g} %, and takes these gradients",
                   100.0 * types.host_share),
       "leave the placement out"},
  };
  for (const auto& [is_met, what, cure] : obstacles) {
    if (!is_met) continue;
    throw ConfigError(
        fmt::format("{}: deeptide.placement.gradients off {} does not go with {}; {}, or give the device "
                    "\"100%\"",
                    config.origin(), device.str(), what, cure));
  }
}

}  // namespace

/// Where each rank steps all, ranks gather their sums on the device first.
std::vector<int64_t> sums_on_device(const Config& config, const optim::Rule& rule, at::Device device,
                                    const std::vector<zero::UnitForecast>& units, const zero::StagePolicy& policy,
                                    int num_ranks, zero::StateTypes& types) {
  int64_t numel = 0;
  for (const zero::UnitForecast& unit : units) numel += unit.numel;
  const bool steps_shard = policy.shard_optimizer || num_ranks == 1;
  const auto asked = share_of_gradients_on_host(config, device, numel);
  if (asked.value_or(0.0) > 0.0) check_gradients_leave(config, rule, device, steps_shard, *asked, types);
  const double share = asked.value_or(steps_shard ? types.host_share : 0.0);
  types.gradients_leave = types.uses_host() && share > 0.0;
  if (share == 0.0) return {};
  std::vector<int64_t> stay;
  zero::HostSplit split(share);
  for (const zero::UnitForecast& unit : units) stay.push_back(split.on_device(unit.numel));
  return stay;
}

}  // namespace deeptide::engine
