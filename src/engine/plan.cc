// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes an engine's choices without the engine, and adds up what its parts would take.
#include "deeptide/plan.h"

#include <algorithm>
#include <set>

#include "deferred/recorder.h"
#include "engine/choices.h"
#include "engine/gradient_places.h"
#include "engine/logical_parameters.h"
#include "engine/optimizer_groups.h"
#include "gradients/forecast.h"
#include "optim/compressed_rule.h"
#include "optim/custom_rule.h"
#include "sharding/residency.h"
#include "tiers/offload.h"
#include "zero/host_exchange.h"
#include "zero/offloaded_parameters.h"
#include "zero/optimizer_states.h"
#include "zero/parameters_out.h"
#include "zero/sign_exchange.h"

namespace deeptide {

using sharding::UnitLayout;

namespace {

using Layouts = std::vector<const UnitLayout*>;

int64_t bytes(int64_t numel, const UnitLayout& layout) {
  return numel * static_cast<int64_t>(c10::elementSize(layout.dtype));
}

/// What the forecasts below depend on.
struct Facts {
  const Config& config;
  const PlannedWorld world;
  const optim::Rule* rule;  // null: no optimizer
  zero::StagePolicy policy;
  at::Device device = at::kCPU;
  zero::StateTypes types;
  std::vector<int64_t> sums_on_device;  // by trained unit; empty: all of them
  engine::BindOptions bind;
  std::vector<ParameterGroup> groups;
  std::vector<sharding::Parameter> parameters;
  std::vector<ModuleInfo> modules;
  std::vector<UnitLayout> layouts;
  bool on_cpu = true;
  bool one_host = true;  // ranks reach each other's memory
  bool shared = false;   // they have one copy of the parameters
  std::vector<bool> is_sharded;

  Layouts all() const {
    Layouts units;
    for (const UnitLayout& layout : layouts) units.push_back(&layout);
    return units;
  }
  Layouts sharded() const {
    Layouts units;
    for (size_t i = 0; i < layouts.size(); ++i) {
      if (!shared && is_sharded[i]) units.push_back(&layouts[i]);
    }
    return units;
  }
  Layouts trainable() const {
    Layouts units;
    for (const UnitLayout& layout : layouts) {
      if (layout.trainable) units.push_back(&layout);
    }
    return units;
  }
};

/// By unit.
std::vector<bool> shards_off_device(const Facts& facts) {
  std::vector<bool> off(facts.layouts.size(), false);
  if (facts.on_cpu || !facts.bind.offload) return off;
  const std::vector<bool> stays = zero::stay_on_device(*facts.bind.offload, facts.sharded());
  size_t next = 0;  // of the sharded ones
  for (size_t i = 0; i < off.size(); ++i) off[i] = facts.is_sharded[i] && !stays[next++];
  return off;
}

std::vector<zero::UnitForecast> stepped_units(const Facts& facts) {
  const std::vector<bool> off_device = shards_off_device(facts);
  std::vector<zero::UnitForecast> units;
  for (size_t i = 0; i < facts.layouts.size(); ++i) {
    const UnitLayout& layout = facts.layouts[i];
    if (!layout.trainable) continue;
    std::set<int> groups;
    for (const sharding::Slot& slot : layout.slots) groups.insert(facts.parameters[slot.parameter].group);
    units.push_back(engine::stepped_unit(layout, std::move(groups), facts.policy, off_device[i]));
  }
  return units;
}

std::vector<Hyperparameters> hyperparameters_of(const std::vector<ParameterGroup>& groups) {
  std::vector<Hyperparameters> hyper;
  for (const ParameterGroup& group : groups) hyper.push_back(group.hyperparameters);
  return hyper;
}

Facts facts_of(const ModelDescription& model, const Config& config, const optim::Rule* rule, const InitOptions& options,
               PlannedWorld world) {
  if (world.ranks_per_host == 0) world.ranks_per_host = world.size;
  TORCH_CHECK_VALUE(world.size > 0 && world.ranks_per_host > 0 && world.size % world.ranks_per_host == 0, "plan: got ",
                    world.size, " ranks, ", world.ranks_per_host, " on each host; expected a whole number of hosts");
  Facts facts{.config = config, .world = world, .rule = rule, .policy = engine::policy_of(config, rule)};
  facts.groups = engine::optimizer_groups(model, config, options);
  facts.parameters = engine::distinct_parameters(model.parameters);
  const at::Device device = engine::common_device(facts.parameters);
  facts.device = device;
  facts.bind = engine::bind_options(config, facts.policy, rule, options.custom.get(), facts.groups, device);
  facts.modules = model.modules;
  facts.on_cpu = device.is_cpu();
  if (rule) facts.types = engine::state_types(config, *rule, facts.groups, device);
  facts.layouts = engine::cut_into_units(facts.parameters, model.modules, engine::named_groups(facts.groups),
                                         facts.bind, world.size);
  facts.is_sharded = engine::choose_sharded(facts.layouts, facts.bind, world.size);
  facts.one_host = world.size == 1 || (world.ranks_per_host == world.size && engine::may_share_memory(config));
  facts.shared = facts.bind.share_memory && facts.on_cpu && world.size > 1 && facts.one_host;
  if (facts.shared) facts.policy = zero::on_one_host(facts.policy);
  if (rule) {
    engine::choose_host_share(config, *rule, hyperparameters_of(facts.groups), stepped_units(facts), facts.types);
    facts.sums_on_device =
        engine::sums_on_device(config, *rule, device, stepped_units(facts), facts.policy, world.size, facts.types);
  }
  return facts;
}

PlanLine parameters_of(const Facts& facts) {
  PlanLine line{.role = MemoryRole::parameters};
  for (size_t i = 0; i < facts.layouts.size(); ++i) {
    const UnitLayout& layout = facts.layouts[i];
    if (facts.shared) {
      line.memory_bytes += bytes(layout.shard, layout);
    } else if (!facts.is_sharded[i]) {
      line.memory_bytes += bytes(layout.numel, layout);
    } else if (!facts.bind.offload) {
      line.memory_bytes += bytes(layout.shard, layout);
    }
  }
  if (facts.bind.offload) {
    const auto split = zero::forecast(*facts.bind.offload, facts.sharded(), facts.on_cpu);
    (facts.on_cpu ? line.memory_bytes : line.off_device_bytes) += split.memory_bytes + split.staging_bytes;
    line.memory_bytes += split.device_bytes;
    line.file_bytes += split.file_bytes;
  }
  return line;
}

/// The states of trained units, in the order in which they are placed.
std::vector<zero::StateForecast> states_of(const Facts& facts, const zero::StateTypes& types) {
  return zero::forecast(stepped_units(facts), *facts.rule, hyperparameters_of(facts.groups), types);
}

/// What gradients and parameters pass through where the host steps: blocks, or, for the caller's own optimizer, all.
int64_t bytes_passing(const Facts& facts) {
  const auto units = stepped_units(facts);
  if (!dynamic_cast<const optim::CustomRule*>(facts.rule)) {
    const int64_t directions = zero::largest_of_matrices(units, *facts.rule, hyperparameters_of(facts.groups));
    return zero::HostExchange::forecast(zero::largest_on_host(units, facts.types.host_share),
                                        /*takes_gradients=*/!facts.types.gradients_leave) +
           directions * static_cast<int64_t>(c10::elementSize(at::kBFloat16));
  }
  if (facts.types.gradients_leave) return 0;
  int64_t numel = 0;
  for (const zero::UnitForecast& unit : units) numel += unit.numel;
  return numel * static_cast<int64_t>(sizeof(float));
}

/// What masters share with the parameters: all, or their upper halves.
int64_t bytes_of_shared_masters(const Facts& facts) {
  int64_t bytes = 0;
  zero::HostSplit split(facts.types.host_share);
  for (const zero::UnitForecast& unit : stepped_units(facts)) {
    const int64_t on_device = split.on_device(unit.numel);
    for (const bool on_host : {false, true}) {
      const bool beside = facts.types.steps_beside(on_host, unit.off_device);
      if (!facts.types.aliases(unit.dtype, beside) && !facts.types.packs(unit.dtype, beside)) continue;
      const int64_t numel = on_host ? unit.numel - on_device : on_device;
      bytes += numel * static_cast<int64_t>(c10::elementSize(unit.dtype));
    }
  }
  return bytes;
}

PlanLine optimizer_of(const Facts& facts) {
  PlanLine line{.role = MemoryRole::optimizer_states};
  if (facts.rule == nullptr) return line;
  const std::vector<zero::StateForecast> states = states_of(facts, facts.types);
  const bool on_host = facts.types.uses_host();  // a share of them
  const auto offload = engine::state_offload(facts.config, *facts.rule, facts.device, states);
  tiers::Split split(offload ? offload->ratio : 0.0);
  for (const zero::StateForecast& state : states) {
    if (state.on_host == on_host) split.resident(state.numel, state.dtype);
  }
  // What an engine will measure is not known: as much as there may be in either place.
  const bool measures = engine::measures_ratio(facts.config) && (offload || on_host);
  line.memory_bytes += measures && !on_host ? zero::total_bytes(states) : split.bytes_in_memory();
  line.file_bytes = split.bytes_in_files();
  if (dynamic_cast<const optim::CompressedRule*>(facts.rule)) {
    line.memory_bytes += zero::SignExchange::forecast(facts.trainable(), facts.world.size).errors;
  }
  if (offload) line.memory_bytes += offload->num_slots * tiers::kSwapBlockBytes;
  if (facts.config.runtime().on_skipped == OnSkipped::rewind) {  // a copy of states and masters
    line.memory_bytes += zero::total_bytes(states) + bytes_of_shared_masters(facts);
  }
  zero::StateTypes types = facts.types;
  if (measures && on_host) types.host_share = 0.0;
  if (on_host) {
    line.off_device_bytes = std::exchange(line.memory_bytes, 0) + bytes_passing(facts);
    line.memory_bytes = zero::total_bytes(states_of(facts, types), false);
  }
  const auto narrowed = zero::narrowed_bytes(stepped_units(facts), types);
  if (narrowed) line.memory_bytes += zero::ParametersOut::forecast(*narrowed);
  return line;
}

PlanLine gathered_of(const Facts& facts) {
  PlanLine line{.role = MemoryRole::gathered};
  const Layouts sharded = facts.sharded();
  if (sharded.empty()) return line;
  int64_t elements = 0;
  for (const UnitLayout& layout : facts.layouts) elements += layout.used;
  line.memory_bytes = sharding::forecast(sharded, engine::residency_limits(facts.config, elements));
  return line;
}

std::vector<std::vector<std::string>> names_of(const Facts& facts, const Layouts& units) {
  std::vector<std::vector<std::string>> names(units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    for (const sharding::Slot& slot : units[i]->slots) names[i].push_back(facts.parameters[slot.parameter].name);
  }
  return names;
}

/// Gradients, then communication.
std::pair<PlanLine, PlanLine> reductions_of(const Facts& facts) {
  PlanLine gradients{.role = MemoryRole::gradients}, communication{.role = MemoryRole::communication};
  const bool two_levels = facts.world.ranks_per_host > 1 && facts.world.ranks_per_host < facts.world.size &&
                          engine::may_share_memory(facts.config);
  if (two_levels && facts.on_cpu) {
    communication.memory_bytes += engine::transport_bytes(facts.all(), facts.policy, facts.rule != nullptr);
  }
  if (facts.rule == nullptr) return {gradients, communication};
  const Layouts units = facts.trainable();
  const auto batch = facts.config.batch_sizes(facts.world.size);
  auto how = engine::reducer_options(facts.config, batch, facts.world.size, facts.policy,
                                     {.num_units = units.size(),
                                      .shard_numel = sharding::shard_numel(units),
                                      .on_cpu = facts.on_cpu,
                                      .rule = facts.rule,
                                      .ranks_per_host = two_levels ? facts.world.ranks_per_host : 1});
  if (facts.on_cpu && !facts.shared && facts.world.size > 1) {
    how.mostly_zero = engine::mostly_zero_units(facts.config, *facts.rule, facts.modules, names_of(facts, units));
  }
  how.stays = facts.sums_on_device;
  const auto bytes_of = gradients::forecast(units, how, facts.world.size, facts.shared);
  if (engine::measures_ratio(facts.config)) how.stays = {};  // as much as there may be in either place
  gradients.memory_bytes = gradients::forecast(units, how, facts.world.size, facts.shared).gradients;
  gradients.off_device_bytes = bytes_of.gradients_on_host;
  gradients.late_bytes = bytes_of.late_gradients;
  gradients.file_bytes = bytes_of.gradients_in_files;
  communication.memory_bytes += bytes_of.communication;
  communication.memory_bytes +=
      engine::step_bytes(units, stepped_units(facts), *facts.rule, facts.groups, facts.policy, facts.world.size);
  communication.late_bytes = bytes_of.late_communication;
  if (facts.config.runtime().keep_grad) {
    for (const UnitLayout* unit : units) gradients.memory_bytes += bytes(unit->numel, *unit);
  }
  return {gradients, communication};
}

std::vector<PlanPhase> phases_of(const Facts& facts, const std::vector<PlanLine>& lines) {
  const auto at = [&](MemoryRole role) {
    return std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.role == role; })->memory_bytes;
  };
  int64_t unit = 0;  // made whole before it is cut
  for (const UnitLayout* layout : facts.sharded()) unit = std::max(unit, bytes(layout->numel, *layout));
  const int64_t kept = at(MemoryRole::parameters) + at(MemoryRole::optimizer_states);
  const int64_t reduced = at(MemoryRole::gradients) + at(MemoryRole::communication);
  const int64_t gathered = at(MemoryRole::gathered);
  // What a step takes for gathers, gradients and messages serves the next one as well.
  return {{"initialize", kept + unit}, {"first forward", kept + gathered}, {"training", kept + gathered + reduced}};
}

}  // namespace

MemoryPlan plan(const ModelDescription& model, const Config& config, const InitOptions& options,
                const PlannedWorld& world) {
  const deferred::Pause pause(deferred::kKey);
  const auto custom = engine::custom_rule_of(options);
  const optim::Rule* rule = custom ? custom.get() : engine::rule_of(config, options);
  engine::check_offload(config, model);
  const Facts facts = facts_of(model, config, rule, options, world);
  MemoryPlan plan{.stage = static_cast<int>(config.zero().stage), .world = facts.world};
  for (const UnitLayout& layout : facts.layouts) {
    plan.num_parameters += layout.used;
    if (layout.trainable) plan.num_trained += layout.used;
  }
  plan.num_units = static_cast<int64_t>(facts.layouts.size());
  plan.shares_memory = facts.shared;
  auto [gradients, communication] = reductions_of(facts);
  plan.lines = {parameters_of(facts), std::move(gradients), optimizer_of(facts), gathered_of(facts),
                std::move(communication)};
  plan.phases = phases_of(facts, plan.lines);
  return plan;
}

}  // namespace deeptide
