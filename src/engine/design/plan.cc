// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds up what the parts of a design take.
#include "engine/design/plan.h"

#include <algorithm>

#include "deferred/recorder.h"
#include "engine/design/choices.h"
#include "engine/design/optimizer_groups.h"
#include "gradients/forecast.h"
#include "numerics/rounding/quantized.h"
#include "optim/compressed/compressed_rule.h"
#include "zero/steps/step_forecast.h"
#include "zero/transfers/host_exchange.h"
#include "zero/transfers/parameters_out.h"
#include "zero/transfers/sign_exchange.h"

namespace deeptide {

using engine::Design;
using engine::UnitRow;
using sharding::UnitLayout;

namespace {

int64_t bytes(int64_t numel, at::ScalarType dtype) { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }

PlanLine parameters_of(const Design& design) {
  PlanLine line{.role = MemoryRole::parameters};
  for (const UnitRow& row : design.units) {
    const bool elsewhere = design.offload && row.place.memory == sharding::UnitMemory::sharded;
    if (!elsewhere) line.memory_bytes += bytes(row.parameters.device, row.layout.dtype);
  }
  if (design.offload) {
    const auto split =
        zero::forecast(*design.offload, design.sharded_layouts(), design.shard_places(), design.on_cpu());
    (design.on_cpu() ? line.memory_bytes : line.off_device_bytes) += split.memory_bytes + split.staging_bytes;
    line.memory_bytes += split.device_bytes;
    line.file_bytes += split.file_bytes;
  }
  return line;
}

/// Bytes through which gradients and parameters pass where the host steps: blocks, or all for the caller's optimizer.
int64_t bytes_passing(const Design& design) {
  const auto units = design.stepped();
  if (!engine::is_callers(design.rule.get())) {
    const int64_t directions = zero::largest_of_matrices(units, *design.rule, design.hyperparameters);
    return zero::HostExchange::forecast(zero::largest_on_host(units, design.types),
                                        /*takes_gradients=*/!design.types.gradients_leave) +
           bytes(directions, at::kBFloat16);
  }
  if (design.types.gradients_leave) return 0;
  int64_t numel = 0;
  for (const zero::UnitForecast& unit : units) numel += unit.numel;
  return bytes(numel, at::kFloat);
}

/// Bytes that masters share with the parameters: all, or their upper halves.
int64_t bytes_of_shared_masters(const Design& design) {
  int64_t shared = 0;
  for (const UnitRow* row : design.trained()) {
    const at::ScalarType dtype = row->layout.dtype;
    for (const bool on_host : {false, true}) {
      const bool beside = design.types.steps_beside(on_host, row->off_device);
      if (!design.types.aliases(dtype, beside) && !design.types.packs(dtype, beside)) continue;
      shared += bytes(on_host ? row->states.host : row->states.device, dtype);
    }
  }
  return shared;
}

PlanLine optimizer_of(const Design& design, const Config& config) {
  PlanLine line{.role = MemoryRole::optimizer_states};
  if (!design.rule) return line;
  const std::vector<zero::StateForecast> states = design.states();
  const bool on_host = design.types.uses_host();  // a share of them
  const auto& files = design.states_in_files;
  for (const zero::StateForecast& state : states) {
    if (!state.kept || state.on_host != on_host) continue;
    line.memory_bytes += state.in_memory * state.item_bytes();
    line.file_bytes += (state.numel - state.in_memory) * state.item_bytes();
  }
  // An engine that will measure has no known share yet: count as much as there may be in either place.
  const bool measures = design.measures_ratio;
  if (measures && !on_host) line.memory_bytes = zero::total_bytes(states);
  if (engine::keeps_whole_states(design.rule.get())) {
    line.memory_bytes += zero::SignExchange::forecast(design.trained_layouts()).errors;
  }
  if (files) line.memory_bytes += files->num_slots * tiers::kSwapBlockBytes;
  if (config.runtime().on_skipped == OnSkipped::rewind) {  // a copy of states and masters
    line.memory_bytes += zero::total_bytes(states) + bytes_of_shared_masters(design);
  }
  zero::StateTypes types = design.types;
  if (measures && on_host) types.on_device = {};
  if (on_host) {
    line.off_device_bytes = std::exchange(line.memory_bytes, 0) + bytes_passing(design);
    const auto at_most = zero::forecast(design.stepped(), *design.rule, design.hyperparameters, types);
    line.memory_bytes = zero::total_bytes(at_most, false);
  }
  const auto narrowed = zero::narrowed_bytes(design.stepped(), types);
  if (narrowed) line.memory_bytes += zero::ParametersOut::forecast(*narrowed);
  return line;
}

PlanLine gathered_of(const Design& design) {
  PlanLine line{.role = MemoryRole::gathered};
  const auto sharded = design.sharded_layouts();
  if (!sharded.empty()) line.memory_bytes = sharding::forecast(sharded, design.residency);
  return line;
}

/// Gradients, then communication.
std::pair<PlanLine, PlanLine> reductions_of(const Design& design, const Config& config) {
  PlanLine gradients{.role = MemoryRole::gradients}, communication{.role = MemoryRole::communication};
  communication.memory_bytes += engine::transport_bytes(design) + engine::step_bytes(design);
  if (!design.rule) return {gradients, communication};
  const auto units = design.trained_layouts();
  const auto bytes_of = gradients::forecast(units, design.reductions, design.num_ranks(), design.is_shared);
  gradients.memory_bytes = bytes_of.gradients;
  if (design.measures_ratio) {  // as much as there may be in either place
    auto how = design.reductions;
    if (!how.offload) how.stays = {};
    gradients.memory_bytes = gradients::forecast(units, how, design.num_ranks(), design.is_shared).gradients;
  }
  gradients.off_device_bytes = bytes_of.gradients_on_host;
  gradients.late_bytes = bytes_of.late_gradients;
  gradients.file_bytes = bytes_of.gradients_in_files;
  communication.memory_bytes += bytes_of.communication;
  communication.late_bytes = bytes_of.late_communication;
  if (config.runtime().keep_grad) {
    for (const UnitLayout* unit : units) gradients.memory_bytes += bytes(unit->numel, unit->dtype);
  }
  return {gradients, communication};
}

std::vector<PlanPhase> phases_of(const Design& design, const std::vector<PlanLine>& lines) {
  const auto at = [&](MemoryRole role) {
    return std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.role == role; })->memory_bytes;
  };
  int64_t unit = 0;  // made whole before it is cut
  for (const UnitLayout* layout : design.sharded_layouts()) unit = std::max(unit, bytes(layout->numel, layout->dtype));
  const int64_t kept = at(MemoryRole::parameters) + at(MemoryRole::optimizer_states);
  const int64_t reduced = at(MemoryRole::gradients) + at(MemoryRole::communication);
  const int64_t gathered = at(MemoryRole::gathered);
  // Memory that a step takes for gathers, gradients and messages serves the next one as well.
  return {{"initialize", kept + unit}, {"first forward", kept + gathered}, {"training", kept + gathered + reduced}};
}

/// Counts what a rank sends of units that all ranks of their teams hold alike.
class Transfers {
 public:
  explicit Transfers(int ranks_per_host) : ranks_per_host_(ranks_per_host) {}

  /// `together`: ranks of each host that sum before one share of theirs travels; 1: every rank sends to all others.
  void add(const std::string& kind, const comm::Team& team, int64_t bytes, int64_t together = 1) {
    if (team.size() == 1 || bytes == 0) return;
    auto line = std::find_if(lines_.begin(), lines_.end(), [&](const auto& each) { return each.kind == kind; });
    if (line == lines_.end()) line = lines_.insert(lines_.end(), {.kind = kind});
    line->bytes += bytes;
    if (together > 1) {
      const int64_t hosts = team.size() / together;
      line->within_bytes += bytes / together * (together - 1);
      line->between_bytes += bytes / together / hosts * (hosts - 1);
      return;
    }
    const auto host_of = [&](int index) { return team.ranks()[static_cast<size_t>(index)] / ranks_per_host_; };
    int64_t here = 0;
    for (int i = 0; i < team.size(); ++i) here += host_of(i) == host_of(team.index()) ? 1 : 0;
    line->within_bytes += bytes / team.size() * (here - 1);
    line->between_bytes += bytes / team.size() * (team.size() - here);
  }
  std::vector<PlanTransfer> lines() && { return std::move(lines_); }

 private:
  const int ranks_per_host_;
  std::vector<PlanTransfer> lines_;
};

/// Bytes of a unit's gradient on the wire; in few bits with one scale in fp32 for each block.
int64_t reduced_bytes(const Design& design, const UnitLayout& unit) {
  const int bits = design.reductions.bits;
  if (bits == 0) return bytes(unit.numel, design.reductions.reduce_dtype);
  return numerics::quantized_bytes(unit.numel, bits);
}

std::vector<PlanTransfer> transfers_of(const Design& design, int64_t micro_batches, int ranks_per_host) {
  Transfers transfers(ranks_per_host);
  const auto& how = design.reductions;
  const int64_t reductions = how.accumulates_whole ? 1 : micro_batches;
  const int64_t spreads = design.topology.has_two_levels() ? design.topology.on_host : 1;
  const auto sharded = design.sharded_layouts();
  const auto gathers = design.is_shared || sharded.empty()
                           ? std::vector<int64_t>(sharded.size())
                           : sharding::forecast_gathers(sharded, design.residency, micro_batches);
  size_t next = 0;
  for (const UnitRow& row : design.units) {
    const UnitLayout& unit = row.layout;
    const bool is_sharded = row.place.memory == sharding::UnitMemory::sharded;
    if (is_sharded)
      transfers.add("parameters", row.place.shard_over, gathers[next++] * bytes(unit.numel, unit.dtype), spreads);
    if (!unit.trainable || !design.rule) continue;
    const int64_t together = row.route == engine::Route::by_hosts ? how.together : 1;
    transfers.add("gradients", row.place.reduce_over, reductions * reduced_bytes(design, unit), together);
    if (design.is_shared || is_sharded) continue;
    if (design.policy.shard_optimizer) {
      transfers.add("parameters", row.place.shard_over, bytes(unit.numel, unit.dtype), spreads);
    } else {
      transfers.add("summed gradients", row.place.shard_over, bytes(unit.numel, at::kFloat), spreads);
    }
  }
  return std::move(transfers).lines();
}

}  // namespace

namespace engine {

/// Ranks of one index on each host gather into memory of malloc's, which keeps it, before a host's ranks spread it.
int64_t transport_bytes(const Design& design) {
  if (!design.topology.has_two_levels() || !design.on_cpu()) return 0;
  const bool gathers_gradients = !design.policy.shard_optimizer;
  int64_t largest = 0;
  for (const UnitRow& row : design.units) {
    if (gathers_gradients && !(row.layout.trainable && design.rule)) continue;
    largest = std::max(largest, bytes(row.layout.numel, gathers_gradients ? at::kFloat : row.layout.dtype));
  }
  return largest;
}

int64_t step_bytes(const Design& design) {
  if (!design.rule) return 0;
  int64_t bytes =
      zero::forecast_step(design.stepped(), *design.rule, design.hyperparameters, design.policy, design.num_ranks());
  if (keeps_whole_states(design.rule.get())) {
    bytes += zero::SignExchange::forecast(design.trained_layouts()).messages;
  }
  return bytes;
}

MemoryPlan plan_of(const Design& design, const Config& config) {
  MemoryPlan plan{.stage = static_cast<int>(config.zero().stage)};
  plan.world = {.size = design.topology.mesh.num_ranks(), .ranks_per_host = design.topology.on_host};
  plan.num_parameters = design.num_elements();
  for (const UnitRow* row : design.trained()) plan.num_trained += row->layout.used;
  plan.num_units = static_cast<int64_t>(design.units.size());
  plan.shares_memory = design.is_shared;
  auto [gradients, communication] = reductions_of(design, config);
  plan.lines = {parameters_of(design), std::move(gradients), optimizer_of(design, config), gathered_of(design),
                std::move(communication)};
  plan.phases = phases_of(design, plan.lines);
  return plan;
}

}  // namespace engine

MemoryPlan plan(const ModelDescription& model, const Config& config, const InitOptions& options,
                const PlannedWorld& planned) {
  const deferred::Pause pause(deferred::kKey);
  PlannedWorld world = planned;
  if (world.ranks_per_host == 0) world.ranks_per_host = world.size;
  TORCH_CHECK_VALUE(world.size > 0 && world.ranks_per_host > 0 && world.size % world.ranks_per_host == 0, "plan: got ",
                    world.size, " ranks, ", world.ranks_per_host, " on each host; expected a whole number of hosts");
  engine::Topology topology{.mesh = world::Mesh::data_parallel(world.size),
                            .on_host = engine::may_share_memory(config) ? world.ranks_per_host : 1,
                            .is_planned_stage = world.is_stage};
  if (options.axes) {
    topology.mesh = options.axes->mesh_of(world.size);
    topology.tenancies = options.axes->tenancies;
    for (const TensorSlice& slice : options.axes->slices) topology.slices.emplace(slice.name, slice);
  }
  auto facts = engine::read_model(model, engine::optimizer_groups(model, config, options));
  const engine::Design design = engine::design(std::move(facts), config, options, topology);
  MemoryPlan plan = engine::plan_of(design, config);
  plan.world = world;
  plan.transfers = transfers_of(design, config.batch_sizes(topology.num_batches()).accumulation, world.ranks_per_host);
  return plan;
}

}  // namespace deeptide
