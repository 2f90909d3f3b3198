// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides from the whole to the unit: cut, share, place parameters, then states, then gradients.
#include "engine/design/design.h"

#include <algorithm>
#include <numeric>

#include "engine/design/choices.h"
#include "engine/design/logical_parameters.h"
#include "engine/design/refusals.h"
#include "host/exchange.h"
#include "tiers/split.h"
#include "tiers/swap_file.h"

namespace deeptide::engine {

using sharding::UnitLayout;
using sharding::UnitMemory;

namespace {

int64_t item_bytes(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

double share_in_files(const MemoryShare& memory, int64_t total) {
  return share_beyond(memory, total, tiers::kSwapBlockBytes / 2);
}

/// Which share of what lies off a device goes to files.
double share_in_files_off_device(const PlacementConfig& placement, const std::vector<zero::StateForecast>& states) {
  const MemoryShare& memory = *placement.optimizer_states;
  const MemoryShare& device = *placement.optimizer_states_on_device;
  const int64_t total = zero::total_bytes(states), off = zero::total_bytes(states, /*on_host=*/true);
  const MemoryShare on_host{memory.fraction - device.fraction, memory.bytes - device.bytes};
  const int64_t allowed = on_host.of(total);
  if (allowed >= off) return 0.0;
  const int64_t safe = on_host.bytes == 0 ? allowed : std::max<int64_t>(0, allowed - tiers::kSwapBlockBytes / 2);
  return 1.0 - static_cast<double>(safe) / static_cast<double>(off);
}

/// Fills in a design, part by part: each part reads what stands before it.
class Designer {
 public:
  Designer(const Config& config, Design& made) : config_(config), made_(made) {}

  void run() {
    cut();
    choose_memory();
    place_parameters();
    made_.residency = residency_limits();
    if (!made_.rule) return;
    place_states();
    place_gradients();
    choose_routes();
  }

 private:
  void cut();
  std::vector<sharding::ParameterSpec> specs() const;
  std::vector<int> shards_by_kind() const;
  int64_t divisor_of(const UnitRow& row, const Tenancy* tenancy) const;
  void choose_memory();
  void place_parameters();
  zero::ParameterOffload offload_of_parameters() const;
  sharding::ResidencyLimits residency_limits() const;
  void place_states();
  double share_of_states_on_host() const;
  std::optional<double> share_of_states_in_files(const std::vector<zero::StateForecast>& states) const;
  void place_gradients();
  std::optional<double> share_of_gradients_off_device(int64_t numel) const;
  void send_gradients_to_files();
  bool keeps_rows(double share_off_device) const;
  std::vector<bool> mostly_zero() const;
  void choose_routes();
  std::vector<int64_t> stepped_numels() const;

  const Config& config_;
  Design& made_;
  std::vector<sharding::ParameterSpec> specs_;
  double states_share_ = 0.0;  // of a device's, that the host steps
};

/// Matrices of a rule that takes them whole need other states than the rest, so other units; so does every tenancy.
std::vector<sharding::ParameterSpec> Designer::specs() const {
  std::vector<sharding::ParameterSpec> specs;
  for (const ParameterFacts& p : made_.model.parameters) {
    const auto dtype = p.dtype == at::kFloat && !p.keeps_full_precision ? made_.compute_dtype : p.dtype;
    const bool takes_whole =
        made_.rule && p.group >= 0 &&
        made_.rule->reach(made_.model.groups.at(p.group).hyperparameters) == optim::Reach::whole_parameter;
    const int tenancy = 1 + made_.topology.tenancy_of(p.name);
    specs.push_back({p.name, p.numel, dtype, p.requires_grad && p.group >= 0, p.group, 2 * tenancy + takes_whole});
  }
  return specs;
}

std::vector<int> Designer::shards_by_kind() const {
  std::vector<int> shards(2, made_.num_ranks());
  for (const Tenancy& tenancy : made_.topology.tenancies) {
    shards.insert(shards.end(), 2, made_.topology.team(tenancy.shard_over).size());
  }
  return shards;
}

/// If each rank along the tensor axis has a gradient alike, a sum over that axis counts as often as it has ranks.
int64_t Designer::divisor_of(const UnitRow& row, const Tenancy* tenancy) const {
  const int tensor = made_.topology.mesh.size(world::Axis::tensor);
  const bool copies = tensor > 1 && row.place.reduce_over == made_.data && !(tenancy && tenancy->adds_up);
  const int64_t batches = config_.gradients().op == GradientOp::mean ? made_.topology.num_batches() : 1;
  return batches * (copies ? tensor : 1);
}

/// A unit moves in one collective, so the bucket sizes bound it.
void Designer::cut() {
  refuse_axes(config_, made_.topology, made_.rule.get(), made_.steps_whole);
  const bool is_stage = made_.topology.is_stage();  // others may have what is trained
  specs_ = specs();
  TORCH_CHECK_VALUE(is_stage || !specs_.empty(), "the model has no parameters: nothing to train");
  check_trainable(specs_, made_.compute_dtype, made_.rule && !is_stage ? config_.origin() : "");
  int64_t most = std::min(config_.zero().reduce_bucket_size, config_.zero().allgather_bucket_size);
  if (config_.runtime().unit_size > 0) most = std::min(most, config_.runtime().unit_size);
  std::vector<sharding::ModuleSpec> paths;
  for (const ModuleInfo& module : made_.model.modules) paths.push_back({module.path, module.type});
  const comm::Team& data = made_.data;
  for (UnitLayout& layout : sharding::build_layout(specs_, paths, {data.size(), most, shards_by_kind()})) {
    UnitRow row{.layout = std::move(layout), .place = {UnitMemory::whole, data, data}};
    const sharding::ParameterSpec& first = specs_[row.layout.slots.front().parameter];
    const Tenancy* tenancy = nullptr;
    if (const int kind = first.kind / 2; kind > 0) {
      tenancy = &made_.topology.tenancies[static_cast<size_t>(kind - 1)];
      row.place.shard_over = made_.topology.team(tenancy->shard_over);
      row.place.reduce_over = made_.topology.team(tenancy->reduce_over);
    }
    if (made_.topology.slices.contains(first.name)) row.place.cut_over = made_.topology.team({world::Axis::tensor});
    row.layout.copies = row.place.reduce_over.size() / row.place.shard_over.size();
    for (const sharding::Slot& slot : row.layout.slots) row.groups.insert(specs_[slot.parameter].group);
    row.divisor = divisor_of(row, tenancy);
    row.saves = row.place.is_first_holder();
    made_.units.push_back(std::move(row));
  }
}

/// Small units stay whole. One rank shards nothing, unless files hold what needs not be whole.
void Designer::choose_memory() {
  // Ranks that share parameters each step a part of them.
  const bool steps_parts = made_.policy.shard_optimizer || !made_.steps_whole;
  const bool may_share = may_share_memory(config_) && made_.topology.can_share && made_.topology.tenancies.empty();
  made_.is_shared = may_share && steps_parts && !keeps_whole_states(made_.rule.get()) && made_.on_cpu() &&
                    made_.num_ranks() > 1 && made_.topology.is_one_host();
  const bool elsewhere = places_parameters(config_, made_.model.device);
  int64_t persistent = 0;
  for (UnitRow& row : made_.units) {
    const int64_t used = row.layout.used;
    const bool persists = used <= config_.zero().param_persistence_threshold &&
                          persistent + used <= config_.zero().model_persistence_threshold;
    if (persists) persistent += used;
    const bool cut = made_.policy.shard_parameters && (row.place.shard_over.size() > 1 || elsewhere) && !persists;
    row.place.memory = made_.is_shared ? UnitMemory::shared : cut ? UnitMemory::sharded : UnitMemory::whole;
  }
  if (made_.is_shared) made_.policy = zero::on_one_host(made_.policy);
}

zero::ParameterOffload Designer::offload_of_parameters() const {
  const OffloadParamConfig& asked = config_.offload_param();
  const PlacementConfig& placement = config_.placement();
  const bool in_files = has_parameters_in_files(config_), on_cpu = made_.on_cpu();
  const bool placed = wants_files(placement.parameters) || (!on_cpu && placement.parameters_on_device);
  zero::ParameterOffload offload{.num_buffers = asked.buffer_count, .buffer_numel = asked.buffer_size};
  if (placed) {
    offload.memory = *placement.parameters;
    if (!on_cpu) offload.on_device = placement.parameters_on_device;
  } else {
    offload.max_in_memory = in_files ? asked.max_in_cpu.value_or(0) : INT64_MAX;
  }
  if (in_files) offload.folders = placed ? placement.folders : asked.folders;
  return offload;
}

void Designer::place_parameters() {
  std::vector<zero::ShardPlace> places;
  if (places_parameters(config_, made_.model.device)) {
    made_.offload = offload_of_parameters();
    places = zero::place_shards(*made_.offload, made_.sharded_layouts());
  }
  size_t next = 0;  // of `places`
  for (UnitRow& row : made_.units) {
    const bool is_whole = row.place.memory == UnitMemory::whole;
    row.parameters.device = is_whole ? row.layout.numel : row.layout.shard;
    if (row.place.memory != UnitMemory::sharded || places.empty()) continue;
    row.shard = places[next++];
    if (row.shard.on_device) continue;
    row.off_device = !made_.on_cpu();
    (made_.on_cpu() ? row.parameters.device : row.parameters.host) = row.shard.resident;
    if (row.off_device) row.parameters.device = 0;
    row.parameters.files = row.layout.shard - row.shard.resident;
  }
}

sharding::ResidencyLimits Designer::residency_limits() const {
  sharding::ResidencyLimits limits;
  // DeepSpeed's default of 1e9 would keep most models whole; overlap needs at most a quarter of the model.
  const int64_t chosen = std::min<int64_t>(1'000'000'000, made_.num_elements() / 4);
  limits.max_live = config_.zero().max_live_parameters.value_or(chosen);
  limits.max_reuse_distance = config_.zero().max_reuse_distance.value_or(INT64_MAX);
  limits.prefetch = config_.zero().overlap_comm ? config_.zero().prefetch_bucket_size : 0;
  return limits;
}

std::vector<int64_t> Designer::stepped_numels() const {
  std::vector<int64_t> numels;
  for (const zero::UnitForecast& unit : made_.stepped()) numels.push_back(unit.numel);
  return numels;
}

/// States that the configuration places by sizes are forecast as if all lay beside the parameters.
double Designer::share_of_states_on_host() const {
  const double asked = share_on_host(config_, made_.model.device);
  if (asked > 0.0 && measures_ratio(config_)) return made_.topology.ratio.value_or(asked);
  const auto& memory = config_.placement().optimizer_states_on_device;
  if (asked == 0.0 || !memory) return asked;
  const int64_t total =
      zero::total_bytes(zero::forecast(made_.stepped(), *made_.rule, made_.hyperparameters, made_.types));
  const auto numels = stepped_numels();
  const int64_t numel = std::accumulate(numels.begin(), numels.end(), int64_t{0});
  return total == 0 ? 1.0 - memory->fraction
                    : share_beyond(*memory, total, zero::kSplitNumel / 2 * (total / numel + 1));
}

void Designer::place_states() {
  zero::StateTypes& types = made_.types = state_types(config_, made_.rule.get());
  states_share_ = share_of_states_on_host();
  const auto numels = stepped_numels();
  if (states_share_ > 0.0) types.on_device = tiers::split(numels, states_share_, zero::kSplitNumel);
  auto states = zero::forecast(made_.stepped(), *made_.rule, made_.hyperparameters, types);
  const size_t num_states = 1 + made_.rule->roles().size();
  if (const auto share = share_of_states_in_files(states)) {
    const OffloadOptimizerConfig& asked = config_.offload_optimizer();
    const PlacementConfig& placement = config_.placement();
    made_.states_in_files =
        tiers::OffloadOptions{wants_files(placement.optimizer_states) ? placement.folders : asked.folders,
                              static_cast<int>(num_states) * static_cast<int>(asked.buffer_count)};
    zero::send_to_files(states, *share, types.uses_host());
    types.in_memory.assign(numels.size(), std::vector<int64_t>(num_states, 0));
  }
  made_.measures_ratio = measures_ratio(config_) && (made_.states_in_files || types.uses_host());
  std::vector<UnitRow*> trained;
  for (UnitRow& row : made_.units) {
    if (!row.layout.trainable) continue;
    const size_t unit = trained.size();
    row.states.device = types.on_device_of(unit, numels[unit]);
    row.states.host = numels[unit] - row.states.device;
    trained.push_back(&row);
  }
  for (const zero::StateForecast& state : states) {
    trained[state.unit]->placed.push_back(state);
    const bool cut = made_.states_in_files && state.on_host == types.uses_host();
    if (cut) types.in_memory[state.unit][state.state] = state.in_memory;
  }
}

/// Absent: files have none.
std::optional<double> Designer::share_of_states_in_files(const std::vector<zero::StateForecast>& states) const {
  // Bytes that are not on a device are in its host's memory otherwise.
  if (!has_states_in_files(config_) || (!made_.on_cpu() && !made_.types.uses_host())) return std::nullopt;
  const OffloadOptimizerConfig& asked = config_.offload_optimizer();
  const PlacementConfig& placement = config_.placement();
  if (wants_files(placement.optimizer_states)) {
    const bool splits = !made_.on_cpu() && placement.optimizer_states_on_device;
    const double share = splits ? share_in_files_off_device(placement, states)
                                : share_in_files(*placement.optimizer_states, zero::total_bytes(states));
    return share == 0.0 ? std::nullopt : std::optional(share);
  }
  if (!made_.on_cpu()) return 1.0;
  return measures_ratio(config_) ? made_.topology.ratio.value_or(asked.ratio) : asked.ratio;
}

/// The share of gradients that a device leaves to its host; absent: not given.
std::optional<double> Designer::share_of_gradients_off_device(int64_t numel) const {
  const PlacementConfig& placement = config_.placement();
  if (!placement.gradients || made_.on_cpu()) return std::nullopt;
  if (!placement.gradients_on_device) return 0.0;
  const MemoryShare& memory = *placement.gradients_on_device;
  if (numel == 0) return 1.0 - memory.fraction;
  const int64_t item = item_bytes(accumulate_type(config_));
  return share_beyond(memory, numel * item, zero::kSplitNumel / 2 * item);
}

void Designer::send_gradients_to_files() {
  const auto& memory = config_.placement().gradients;
  if (!wants_files(memory)) return;
  gradients::ReducerOptions& how = made_.reductions;
  const int64_t item = item_bytes(how.accumulate_dtype);
  std::vector<int64_t> sizes;
  for (const UnitRow* row : made_.trained()) sizes.push_back(row->layout.shard * item);
  const double share = share_in_files(*memory, std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  if (share == 0.0) return;
  how.offload = tiers::OffloadOptions{config_.placement().folders, kGradientBlocks};
  for (const int64_t bytes : tiers::split(sizes, share, tiers::kSwapBlockBytes)) how.stays.push_back(bytes / item);
}

/// Whether to keep received rows unsummed until step(): if no further micro-batch is added to them, each rank steps at
/// most its shard, and all rows of a shard take at most the memory of their sum.
bool Designer::keeps_rows(double share_off_device) const {
  const auto& how = made_.reductions;
  if (config_.runtime().keep_grad || how.offload || !how.ordered || how.bits > 0) return false;
  // On a device those of a single rank, which are its gradients themselves; not where the host steps some.
  if (!made_.on_cpu() && (made_.num_ranks() > 1 || share_off_device > 0.0)) return false;
  const bool one_micro_batch = config_.batch_sizes(made_.topology.num_batches()).accumulation == 1;
  const bool fit = made_.num_ranks() * item_bytes(how.reduce_dtype) <= item_bytes(how.accumulate_dtype);
  return one_micro_batch && fit && made_.steps_shard() && made_.trained().size() <= host::Exchange::kMaxOffers / 4;
}

/// By trained unit: whether it has an embedding's weight. Classes derived from torch's keep the word in their names.
/// Empty: none does, or gradients do not travel.
std::vector<bool> Designer::mostly_zero() const {
  const bool travels = made_.on_cpu() && !made_.is_shared && made_.num_ranks() > 1;
  if (!travels || !made_.reductions.ordered || !config_.gradients().sparse) return {};
  if (!made_.topology.tenancies.empty()) return {};
  if (keeps_whole_states(made_.rule.get())) return {};
  std::set<std::string> weights;
  for (const ModuleInfo& module : made_.model.modules) {
    const bool is_embedding = module.type.find("Embedding") != std::string::npos;
    if (is_embedding) weights.insert(module.path.empty() ? "weight" : module.path + ".weight");
  }
  std::vector<bool> found;
  for (const UnitLayout* layout : made_.trained_layouts()) {
    found.push_back(std::any_of(layout->slots.begin(), layout->slots.end(), [&](const sharding::Slot& slot) {
      return weights.contains(specs_[slot.parameter].name);
    }));
  }
  return found;
}

/// Sums go where they are stepped, unless the configuration places them. Where each rank steps all, ranks gather their
/// sums on the device first.
void Designer::place_gradients() {
  const auto numels = stepped_numels();
  const auto asked = share_of_gradients_off_device(std::accumulate(numels.begin(), numels.end(), int64_t{0}));
  refuse(config_, made_.model, *made_.rule,
         {.steps_shard = made_.steps_shard(),
          .gradients_share = asked.value_or(0.0),
          .states_share = states_share_,
          .states_in_files = made_.states_in_files.has_value()});
  const double share = asked.value_or(made_.steps_shard() ? states_share_ : 0.0);
  made_.types.gradients_leave = made_.types.uses_host() && share > 0.0;
  gradients::ReducerOptions& how = made_.reductions;
  const BatchSizes batch = config_.batch_sizes(made_.topology.num_batches());
  how.bits = made_.is_shared || made_.num_ranks() == 1 ? 0 : quantized_bits(config_);
  how.feedback = how.bits > 0 && config_.runtime().quantized_error_feedback;
  how.reduce_dtype = how.bits > 0 ? at::kFloat : reduce_type(config_);
  how.accumulate_dtype = accumulate_type(config_);
  how.ordered = config_.runtime().reduction == Reduction::ordered;
  const int on_host = made_.topology.in_order && made_.topology.can_share ? made_.topology.on_host : 1;
  const bool sums_on_hosts =
      made_.on_cpu() && how.ordered && how.bits == 0 && on_host < made_.num_ranks() && made_.topology.tenancies.empty();
  how.together = sums_on_hosts ? gradients::summed_together(on_host, how.reduce_dtype) : 1;
  how.overlap = config_.zero().overlap_comm;
  how.accumulates_whole =
      keeps_whole_states(made_.rule.get()) || (!made_.policy.reduce_every_micro && batch.accumulation > 1);
  for (const UnitRow* row : made_.trained()) {
    how.scales.push_back(1.0 / static_cast<double>(batch.accumulation * row->divisor));
  }
  how.reserve = made_.on_cpu();
  if (!made_.on_cpu()) how.finite_check = gradients::FiniteCheckTime::each_step;
  send_gradients_to_files();
  how.keep_rows = keeps_rows(std::max(share, states_share_));
  how.mostly_zero = mostly_zero();
  if (share > 0.0) how.stays = tiers::split(numels, share, zero::kSplitNumel);
}

void Designer::choose_routes() {
  const gradients::ReducerOptions& how = made_.reductions;
  size_t next = 0;
  for (UnitRow& row : made_.units) {
    if (!row.layout.trainable) continue;
    const size_t trained = next++;
    row.route = row.place.reduce_over.size() == 1 ? Route::alone
                : made_.is_shared                 ? Route::shared_memory
                : how.bits > 0                    ? Route::quantized
                : how.together > 1                ? Route::by_hosts
                : how.ordered                     ? Route::all_to_all
                                                  : Route::transport;
    row.mostly_zero = !how.mostly_zero.empty() && how.mostly_zero[trained];
    const int64_t shard = row.layout.shard;
    row.gradients.device = how.stays_of(trained, shard);
    (how.offload ? row.gradients.files : row.gradients.host) = shard - row.gradients.device;
  }
}

template <typename Keeps>
std::vector<const UnitLayout*> layouts_where(const std::vector<UnitRow>& units, Keeps keeps) {
  std::vector<const UnitLayout*> layouts;
  for (const UnitRow& row : units) {
    if (keeps(row)) layouts.push_back(&row.layout);
  }
  return layouts;
}

}  // namespace

int64_t Design::num_elements() const {
  int64_t numel = 0;
  for (const UnitRow& row : units) numel += row.layout.used;
  return numel;
}

std::vector<const UnitRow*> Design::trained() const {
  std::vector<const UnitRow*> rows;
  for (const UnitRow& row : units) {
    if (row.layout.trainable) rows.push_back(&row);
  }
  return rows;
}

std::vector<const UnitLayout*> Design::layouts() const {
  return layouts_where(units, [](const UnitRow&) { return true; });
}

std::vector<const UnitLayout*> Design::trained_layouts() const {
  return layouts_where(units, [](const UnitRow& row) { return row.layout.trainable; });
}

std::vector<const UnitLayout*> Design::sharded_layouts() const {
  return layouts_where(units, [](const UnitRow& row) { return row.place.memory == UnitMemory::sharded; });
}

std::vector<zero::UnitForecast> Design::stepped() const {
  std::vector<zero::UnitForecast> stepped;
  for (const UnitRow* row : trained()) {
    stepped.push_back({.numel = policy.shard_optimizer ? row->layout.shard : row->layout.numel,
                       .whole_numel = row->layout.numel,
                       .dtype = row->layout.dtype,
                       .groups = row->groups,
                       .cut_over = row->place.cut_ranks(),
                       .off_device = row->off_device});
  }
  return stepped;
}

std::vector<zero::StateForecast> Design::states() const {
  std::vector<zero::StateForecast> states;
  for (const UnitRow& row : units) states.insert(states.end(), row.placed.begin(), row.placed.end());
  return states;
}

std::vector<zero::ShardPlace> Design::shard_places() const {
  std::vector<zero::ShardPlace> places;
  for (const UnitRow& row : units) {
    if (row.place.memory == UnitMemory::sharded) places.push_back(row.shard);
  }
  return places;
}

std::vector<ChannelRow> Design::channels() const {
  using Purpose = ChannelRow::Purpose;
  std::vector<ChannelRow> rows{{data, Purpose::gathers}, {data, Purpose::reductions}};
  const auto add = [&](const comm::Team& team, Purpose purpose) {
    const bool known = std::any_of(rows.begin(), rows.end(),
                                   [&](const ChannelRow& row) { return row.purpose == purpose && row.team == team; });
    if (!known) rows.push_back({team, purpose});
  };
  for (const UnitRow& row : units) {
    add(row.place.shard_over, Purpose::gathers);
    add(row.place.reduce_over, Purpose::gathers);  // what replicas take from each other
    add(row.place.reduce_over, Purpose::reductions);
    add(row.place.shard_over, Purpose::reductions);  // what a step publishes, and whole sums at stage 0
    if (joins_slices(rule.get()) && row.place.cut_over) add(*row.place.cut_over, Purpose::reductions);
  }
  return rows;
}

namespace {

Design made_of(ModelFacts facts, std::shared_ptr<const optim::Rule> rule, bool steps_whole, const Config& config,
               const Topology& topology) {
  refuse(config, facts, rule.get());
  Design made{.topology = topology,
              .model = std::move(facts),
              .rule = std::move(rule),
              .steps_whole = steps_whole,
              .policy = zero::kStages.at(config.zero().stage),
              .compute_dtype = scalar_type(config.compute_dtype()),
              .data = topology.data()};
  for (const ParameterGroup& group : made.model.groups) made.hyperparameters.push_back(group.hyperparameters);
  Designer(config, made).run();
  return made;
}

}  // namespace

Design design(ModelFacts facts, const Config& config, const InitOptions& options, const Topology& topology) {
  const bool steps_whole = options.custom && !options.custom->needs_whole().empty();
  return made_of(std::move(facts), rule_of(config, options), steps_whole, config, topology);
}

Design design(const Design& before, const Config& config, const Topology& topology) {
  return made_of(before.model, before.rule, before.steps_whole, config, topology);
}

}  // namespace deeptide::engine
