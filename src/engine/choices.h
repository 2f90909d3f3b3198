// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What follows from configuration, model and number of ranks alone: an engine and a plan of one make the same choices.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "deeptide/engine.h"
#include "engine/bound_model.h"
#include "gradients/flights.h"
#include "optim/rule.h"
#include "sharding/residency.h"
#include "tiers/offload.h"
#include "zero/optimizer_states.h"
#include "zero/policy.h"

namespace deeptide::engine {

/// Of gradients in files, in memory at a time: one in use, others read or written.
inline constexpr int kGradientBlocks = 6;

/// Null: the rule of the configuration steps.
std::unique_ptr<optim::Rule> custom_rule_of(const InitOptions& options);
/// Null: no optimizer.
const optim::Rule* rule_of(const Config& config, const InitOptions& options);

/// Returns the stage's policy. Errors: ConfigError where the rule needs what the stage cuts.
zero::StagePolicy policy_of(const Config& config, const optim::Rule* rule);

/// The data type in which gradients travel.
at::ScalarType reduce_type(const Config& config);
/// The data type of their sums, over micro-batches and ranks.
at::ScalarType accumulate_type(const Config& config);
/// Which share of `total` bytes has to go elsewhere, so that `memory` holds no more than it may though a split is exact
/// to half a block only. Units: bytes.
double share_beyond(const MemoryShare& memory, int64_t total, int64_t half_block);

/// Of the elements of such a device, the share whose states lie off it and that the host steps; at most, if it is
/// measured.
double share_on_host(const Config& config, at::Device device);
/// `device`: of the parameters. Errors: ConfigError where the rule under one of the groups' hyper-parameters needs
/// fp32, or cannot step on the host.
zero::StateTypes state_types(const Config& config, const optim::Rule& rule, const std::vector<ParameterGroup>& groups,
                             at::Device device);

/// Whether ranks of one host may have one copy of the parameters.
bool may_share_memory(const Config& config);

/// Errors: ConfigError naming a key that does not go with the others.
BindOptions bind_options(const Config& config, const zero::StagePolicy& policy, const optim::Rule* rule,
                         const CustomOptimizer* custom, const std::vector<ParameterGroup>& groups, at::Device device);
/// The device of the first parameter, which is that of all where a model can be bound.
at::Device device_of(const ModelDescription& model);
/// Errors: ConfigError where the configuration keeps in files what lies in memory on a device that is no CPU.
void check_offload(const Config& config, const ModelDescription& model);
/// Where the configuration places states by sizes and shares: sets the host's share, to forecast with.
void choose_host_share(const Config& config, const optim::Rule& rule, const std::vector<Hyperparameters>& groups,
                       const std::vector<zero::UnitForecast>& units, zero::StateTypes& types);
/// `device`: of the parameters. `states`: of this rank. Absent: what does not lie on such a device lies in memory.
/// Errors: as above.
std::optional<tiers::OffloadOptions> state_offload(const Config& config, const optim::Rule& rule, at::Device device,
                                                   const std::vector<zero::StateForecast>& states);

/// Whether the share of states in files, or off a device, is "auto": `state_offload` and `share_on_host` then have the
/// most that there may be.
bool measures_ratio(const Config& config);

/// `num_elements`: of the model.
sharding::ResidencyLimits residency_limits(const Config& config, int64_t num_elements);

struct ReducedUnits {
  size_t num_units = 0;
  int64_t shard_numel = 0;  // over all units
  bool on_cpu = true;
  const optim::Rule* rule = nullptr;
  int ranks_per_host = 1;  // where there are several hosts of equally many, numbered host by host
};
/// All but what depends on the process: the side thread and what is done while waiting.
gradients::ReducerOptions reducer_options(const Config& config, const BatchSizes& batch, int num_ranks,
                                          const zero::StagePolicy& policy, const ReducedUnits& units);

/// By trained unit: whether it has an embedding's weight, whose gradient travels without its zeros; empty: none does.
/// For ranks whose gradients travel. `names`: of each unit's parameters.
std::vector<bool> mostly_zero_units(const Config& config, const optim::Rule& rule,
                                    const std::vector<ModuleInfo>& modules,
                                    const std::vector<std::vector<std::string>>& names);

/// What a transport of two levels keeps for itself. Units: bytes.
int64_t transport_bytes(const std::vector<const sharding::UnitLayout*>& units, const zero::StagePolicy& policy,
                        bool trains);

/// A trained unit as the optimizer sees it. `groups`: of its parameters; `off_device`: whether its shard lies so.
zero::UnitForecast stepped_unit(const sharding::UnitLayout& layout, std::set<int> groups,
                                const zero::StagePolicy& policy, bool off_device);

/// Memory of what ranks exchange within a step. `trained` and `stepped`: the same units. Units: bytes.
int64_t step_bytes(const std::vector<const sharding::UnitLayout*>& trained,
                   const std::vector<zero::UnitForecast>& stepped, const optim::Rule& rule,
                   const std::vector<ParameterGroup>& groups, const zero::StagePolicy& policy, int num_ranks);

}  // namespace deeptide::engine
