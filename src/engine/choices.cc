// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the choices off the configuration.
#include "engine/choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "deeptide/errors.h"
#include "engine/logical_parameters.h"
#include "host/exchange.h"
#include "optim/compressed_rule.h"
#include "optim/custom_rule.h"
#include "tiers/swap_file.h"
#include "zero/sign_exchange.h"
#include "zero/step_forecast.h"

namespace deeptide::engine {

using at::ScalarType;

namespace {

ScalarType scalar_type(DataType type) {
  static constexpr ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};
  return kTypes[static_cast<int>(type)];
}

/// By group: matrices of a rule that takes them whole need other states than the rest, so other units.
std::vector<int> kinds_of(const optim::Rule* rule, const std::vector<ParameterGroup>& groups) {
  std::vector<int> kinds;
  for (const ParameterGroup& group : groups) {
    const bool whole = rule && rule->reach(group.hyperparameters) == optim::Reach::whole_parameter;
    kinds.push_back(whole ? 1 : 0);
  }
  return kinds;
}

bool wants_files(const std::optional<MemoryShare>& memory) { return memory && !memory->is_all(); }

/// On a CPU the host's memory is where parameters are.
bool has_parameters_in_files(const Config& config) {
  return config.offload_param().device == OffloadDevice::nvme || wants_files(config.placement().parameters);
}

bool has_states_in_files(const Config& config) {
  const OffloadOptimizerConfig& asked = config.offload_optimizer();
  return (asked.device == OffloadDevice::nvme && asked.ratio > 0.0) || wants_files(config.placement().optimizer_states);
}

double share_in_files(const MemoryShare& memory, int64_t total) {
  return share_beyond(memory, total, tiers::kSwapBlockBytes / 2);
}

/// Errors: ConfigError where a device steps some of the parameters that lie off it, and masters are to be packed: the
/// half that would be shared is not there.
void check_packed_beside_shards(const Config& config, const optim::Rule* rule, at::Device device) {
  if (device.is_cpu() || rule == nullptr || !config.runtime().packed_states) return;
  const bool placed = config.placement().optimizer_states.has_value();
  if (!placed && !measures_ratio(config) && share_on_host(config, device) == 1.0) return;
  throw ConfigError(fmt::format(
      "{}: deeptide.packed_states with parameters off {} needs offload_optimizer with a ratio of 1: what the device "
      "steps has whole masters there. Set packed_states to false, or let the host step all",
      config.origin(), device.str()));
}

/// Absent: shards lie in the device's memory.
std::optional<zero::ParameterOffload> parameter_offload(const Config& config, const optim::Rule* rule,
                                                        at::Device device) {
  const OffloadParamConfig& asked = config.offload_param();
  const PlacementConfig& placement = config.placement();
  const bool in_files = has_parameters_in_files(config);
  const bool off_device = !device.is_cpu() && placement.parameters_on_device;
  if (!in_files && !off_device && (device.is_cpu() || asked.device == OffloadDevice::none)) return std::nullopt;
  const bool placed = wants_files(placement.parameters) || off_device;
  const std::string subject =
      config.origin() +
      (placed ? fmt::format(": deeptide.placement.parameters {} ", in_files ? "in files" : "off the device")
              : fmt::format(": zero_optimization.offload_param.device \"{}\" ", in_files ? "nvme" : "cpu"));
  if (config.zero().stage != 3) {
    throw ConfigError(subject + "needs stage 3, where each rank keeps a shard of the parameters; the stage is " +
                      std::to_string(config.zero().stage));
  }
  check_packed_beside_shards(config, rule, device);
  zero::ParameterOffload offload{.num_buffers = asked.buffer_count, .buffer_numel = asked.buffer_size};
  if (placed) {
    offload.memory = *placement.parameters;
    if (!device.is_cpu()) offload.on_device = placement.parameters_on_device;
  } else {
    offload.max_in_memory = in_files ? asked.max_in_cpu.value_or(0) : INT64_MAX;
  }
  if (!in_files) return offload;
  if (!placed && asked.folders.empty()) {
    throw ConfigError(subject + "needs nvme_path: a folder on the drive, or a list of folders");
  }
  if (config.runtime().on_skipped == OnSkipped::rewind) {
    throw ConfigError(subject +
                      "does not go with deeptide.on_skipped \"rewind\", which keeps a copy of the parameters "
                      "in memory; choose \"skip\" or \"raise\"");
  }
  offload.folders = placed ? placement.folders : asked.folders;
  return offload;
}

/// Absent: sums lie in memory. `total_bytes`: of all of them.
std::optional<tiers::OffloadOptions> gradient_offload(const Config& config, const optim::Rule* rule,
                                                      int64_t total_bytes) {
  const auto& memory = config.placement().gradients;
  if (!wants_files(memory)) return std::nullopt;
  if (dynamic_cast<const optim::CustomRule*>(rule)) {
    throw ConfigError(
        config.origin() +
        ": deeptide.placement.gradients in files is for the optimizers of deeptide: one of your own takes "
        "its gradients from memory. Leave them there, or name the optimizer in the configuration");
  }
  const double share = share_in_files(*memory, total_bytes);
  if (share == 0.0) return std::nullopt;
  return tiers::OffloadOptions{config.placement().folders, share, kGradientBlocks};
}

/// Each rank steps whole parameters with states of its own.
bool keeps_whole_states(const optim::Rule* rule) { return dynamic_cast<const optim::CompressedRule*>(rule) != nullptr; }

/// Errors: ConfigError naming what keeps the host from stepping a device's parameters.
void check_host_steps(const Config& config, const optim::Rule& rule, const std::vector<ParameterGroup>& groups,
                      at::Device device) {
  const bool takes_matrices = std::any_of(groups.begin(), groups.end(), [&](const ParameterGroup& group) {
    return rule.reach(group.hyperparameters) == optim::Reach::whole_parameter;
  });
  const bool placed = config.placement().optimizer_states.has_value();
  const char* const asked =
      placed ? "deeptide.placement.optimizer_states off the device" : "zero_optimization.offload_optimizer";
  const char* const other_cure = placed ? "give the device \"100%\"" : "set the section's device to \"none\"";
  const bool in_two_places = placed || measures_ratio(config) || config.offload_optimizer().ratio < 1.0;
  const std::string optimizer = "the optimizer " + rule.name();
  const std::tuple<bool, std::string, const char*> obstacles[] = {
      {config.runtime().packed_states && config.offload_param().device == OffloadDevice::none,
       "deeptide.packed_states without offload_param", "leave it out: masters take no memory of the device then"},
      {takes_matrices && in_two_places, optimizer + ", which takes whole matrices, in two places",
       "set its ratio to 1, with no placement"},
      {keeps_whole_states(&rule), optimizer + ", whose ranks exchange signs", "choose another one"},
      {in_two_places && dynamic_cast<const optim::CustomRule*>(&rule) != nullptr,
       optimizer + ", your own, which steps states in one place", "set its ratio to 1, with no placement"},
  };
  for (const auto& [is_met, what, cure] : obstacles) {
    if (!is_met) continue;
    throw ConfigError(fmt::format("{}: {} on {} does not go with {} yet; {}, or {}", config.origin(), asked,
                                  device.str(), what, cure, other_cure));
  }
}

/// Whether to keep received rows unsummed until step(): if no further micro-batch is added to them, each rank steps at
/// most its shard, and all rows of a shard take at most the memory of their sum.
bool keeps_rows(const Config& config, const BatchSizes& batch, int num_ranks, const zero::StagePolicy& policy) {
  const size_t bytes_of_sum = c10::elementSize(accumulate_type(config));
  const size_t bytes_of_rows = static_cast<size_t>(num_ranks) * c10::elementSize(reduce_type(config));
  const bool steps_shard = policy.shard_optimizer || num_ranks == 1;
  const bool ordered = config.runtime().reduction == Reduction::ordered;
  return steps_shard && batch.accumulation == 1 && ordered && bytes_of_rows <= bytes_of_sum;
}

}  // namespace

double share_beyond(const MemoryShare& memory, int64_t total, int64_t half_block) {
  if (memory.bytes == 0) return 1.0 - memory.fraction;
  const int64_t allowed = memory.of(total);
  if (allowed == total) return 0.0;
  const int64_t safe = std::max<int64_t>(0, allowed - half_block);
  return 1.0 - static_cast<double>(safe) / static_cast<double>(total);
}

std::unique_ptr<optim::Rule> custom_rule_of(const InitOptions& options) {
  return options.custom ? std::make_unique<optim::CustomRule>(options.custom->info()) : nullptr;
}

const optim::Rule* rule_of(const Config& config, const InitOptions& options) {
  const std::string type = options.optimizer.value_or(config.optimizer().type);
  return type.empty() ? nullptr : &optim::find_rule(type);
}

zero::StagePolicy policy_of(const Config& config, const optim::Rule* rule) {
  const int stage = config.zero().stage;
  if (stage > 0 && keeps_whole_states(rule)) {
    throw ConfigError(fmt::format(
        "{}: zero_optimization.stage is {}, but {} needs stage 0: each rank steps whole parameters, with a momentum of "
        "its own gradients. Set the stage to 0, or choose another optimizer",
        config.origin(), stage, rule->name()));
  }
  return zero::kStages.at(stage);
}

at::ScalarType reduce_type(const Config& config) {
  return scalar_type(config.precision().communication_dtype.value_or(config.compute_dtype()));
}

at::ScalarType accumulate_type(const Config& config) {
  const PrecisionConfig& precision = config.precision();
  const DataType unless_given = precision.rounds_masters() ? config.compute_dtype() : DataType::fp32;
  return scalar_type(precision.gradient_accumulation_dtype.value_or(unless_given));
}

double share_on_host(const Config& config, at::Device device) {
  const OffloadOptimizerConfig& asked = config.offload_optimizer();
  if (config.placement().optimizer_states) {
    return device.is_cpu() || !config.placement().optimizer_states_on_device ? 0.0 : 1.0;
  }
  return device.is_cpu() || asked.device == OffloadDevice::none ? 0.0 : asked.ratio;
}

zero::StateTypes state_types(const Config& config, const optim::Rule& rule, const std::vector<ParameterGroup>& groups,
                             at::Device device) {
  const double on_host = share_on_host(config, device);
  if (on_host > 0.0) check_host_steps(config, rule, groups, device);
  const PrecisionConfig& precision = config.precision();
  const RuntimeConfig& runtime = config.runtime();
  const bool elementwise =
      rule.reach(Hyperparameters(rule.info())) == optim::Reach::elementwise && !keeps_whole_states(&rule);
  const auto refuse = [&](const char* key, const std::string& why) {
    throw ConfigError(fmt::format("{}: {} {}", config.origin(), key, why));
  };
  const std::string elements =
      "is for optimizers that step each element by itself: Adam, AdamW, SGD, Lion, Adagrad, "
      "RMSprop; " +
      rule.name();
  zero::StateTypes types{.rounded_masters = precision.rounds_masters(), .rounded_moments = precision.rounds_moments()};
  types.host_share = on_host;
  if (types.rounded_masters && !elementwise) {
    refuse(precision.fp16 ? "fp16.fp16_master_weights_and_grads" : "bf16.bf16_master_weights_and_grads",
           elements + " needs fp32 masters. Set it to false, or choose one of them");
  }
  types.lends_masters = dynamic_cast<const optim::CustomRule*>(&rule) != nullptr;
  types.packed_masters = runtime.packed_states;
  if (types.packed_masters && dynamic_cast<const optim::CustomRule*>(&rule)) {
    refuse("deeptide.packed_states", "is for the optimizers of deeptide: " + rule.name() +
                                         ", your own, steps fp32 masters where they lie. Set it to false, or name the "
                                         "optimizer in the configuration");
  }
  if (runtime.moment_dtype != DataType::bf16) return types;
  types.moments_seed = runtime.seed;
  if (!elementwise) refuse("deeptide.moment_dtype", elements + " needs fp32. Leave it out, or choose one of them");
  for (const ParameterGroup& group : groups) {
    const std::string why = rule.needs_fp32_states(group.hyperparameters);
    if (!why.empty()) refuse("deeptide.moment_dtype", "\"bf16\" does not suit " + rule.name() + ": " + why);
  }
  return types;
}

/// What ranks of one host share would be whole in memory. A rank that waits for one of the host's channels moves
/// nothing on the others, so large gathers and rounds would wait on each other there.
bool may_share_memory(const Config& config) {
  return config.runtime().shared_memory && !has_parameters_in_files(config);
}

BindOptions bind_options(const Config& config, const zero::StagePolicy& policy, const optim::Rule* rule,
                         const CustomOptimizer* custom, const std::vector<ParameterGroup>& groups, at::Device device) {
  BindOptions options;
  // Ranks that share parameters each step a part of them.
  const bool steps_parts = policy.shard_optimizer || !custom || custom->needs_whole().empty();
  options.share_memory = steps_parts && !keeps_whole_states(rule);
  options.offload = parameter_offload(config, rule, device);
  options.kinds = kinds_of(rule, groups);
  options.compute_dtype = scalar_type(config.compute_dtype());
  if (config.precision().buffer_dtype) options.buffers.asked = scalar_type(*config.precision().buffer_dtype);
  options.buffers.in_fp32 = config.precision().keep_in_fp32;
  options.shard_parameters = policy.shard_parameters;
  options.persistence_threshold = config.zero().param_persistence_threshold;
  options.model_persistence_threshold = config.zero().model_persistence_threshold;
  // A unit moves in one collective, so the bucket sizes bound it.
  options.max_unit_numel = std::min(config.zero().reduce_bucket_size, config.zero().allgather_bucket_size);
  if (config.runtime().unit_size > 0)
    options.max_unit_numel = std::min(options.max_unit_numel, config.runtime().unit_size);
  if (rule) options.trained_by = config.origin();
  return options;
}

at::Device device_of(const ModelDescription& model) {
  return model.parameters.empty() ? at::Device(at::kCPU) : model.parameters.front().tensor.device();
}

void check_offload(const Config& config, const ModelDescription& model) {
  const PlacementConfig& placement = config.placement();
  const std::tuple<bool, const char*, const char*> asked[] = {
      {wants_files(placement.gradients), "deeptide.placement.gradients in files",
       "give the host's memory, \"cpu\", what the device does not have"},
  };
  for (const auto& [is_asked, key, cure] : asked) {
    if (!is_asked) continue;
    const at::Device device = common_device(distinct_parameters(model.parameters));
    if (device.is_cpu()) return;
    throw ConfigError(fmt::format("{}: {} is not supported yet on {}; {}", config.origin(), key, device.str(), cure));
  }
}

bool measures_ratio(const Config& config) {
  return config.offload_optimizer().measures_ratio && !config.placement().optimizer_states;
}

void choose_host_share(const Config& config, const optim::Rule& rule, const std::vector<Hyperparameters>& groups,
                       const std::vector<zero::UnitForecast>& units, zero::StateTypes& types) {
  const auto& memory = config.placement().optimizer_states_on_device;
  if (!types.uses_host() || !memory) return;
  zero::StateTypes beside = types;
  beside.host_share = 0.0;
  const int64_t total = zero::total_bytes(zero::forecast(units, rule, groups, beside));
  int64_t numel = 0;
  for (const zero::UnitForecast& unit : units) numel += unit.numel;
  types.host_share =
      total == 0 ? 1.0 - memory->fraction : share_beyond(*memory, total, zero::kSplitNumel / 2 * (total / numel + 1));
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

std::optional<tiers::OffloadOptions> state_offload(const Config& config, const optim::Rule& rule, at::Device device,
                                                   const std::vector<zero::StateForecast>& states) {
  if (!has_states_in_files(config)) return std::nullopt;  // the host's memory has them
  const OffloadOptimizerConfig& asked = config.offload_optimizer();
  const int blocks = (1 + static_cast<int>(rule.roles().size())) * static_cast<int>(asked.buffer_count);
  if (const auto& memory = config.placement().optimizer_states; wants_files(memory)) {
    const PlacementConfig& placement = config.placement();
    const bool splits = !device.is_cpu() && placement.optimizer_states_on_device;
    const double share =
        splits ? share_in_files_off_device(placement, states) : share_in_files(*memory, zero::total_bytes(states));
    if (share == 0.0) return std::nullopt;
    return tiers::OffloadOptions{placement.folders, share, blocks};
  }
  if (asked.folders.empty()) {
    throw ConfigError(config.origin() +
                      ": zero_optimization.offload_optimizer.device \"nvme\" needs nvme_path: a folder "
                      "on the drive, or a list of folders");
  }
  return tiers::OffloadOptions{asked.folders, device.is_cpu() ? asked.ratio : 1.0, blocks};
}

sharding::ResidencyLimits residency_limits(const Config& config, int64_t num_elements) {
  sharding::ResidencyLimits limits;
  // DeepSpeed's default of 1e9 would keep most models whole; overlap needs at most a quarter of the model.
  const int64_t chosen = std::min<int64_t>(1'000'000'000, num_elements / 4);
  limits.max_live = config.zero().max_live_parameters.value_or(chosen);
  limits.max_reuse_distance = config.zero().max_reuse_distance.value_or(INT64_MAX);
  limits.prefetch = config.zero().overlap_comm ? config.zero().prefetch_bucket_size : 0;
  return limits;
}

gradients::ReducerOptions reducer_options(const Config& config, const BatchSizes& batch, int num_ranks,
                                          const zero::StagePolicy& policy, const ReducedUnits& units) {
  gradients::ReducerOptions options;
  options.reduce_dtype = reduce_type(config);
  options.accumulate_dtype = accumulate_type(config);
  options.ordered = config.runtime().reduction == Reduction::ordered;
  const bool sums_on_hosts = units.on_cpu && options.ordered && units.ranks_per_host < num_ranks;
  options.together = sums_on_hosts ? gradients::summed_together(units.ranks_per_host, options.reduce_dtype) : 1;
  options.overlap = config.zero().overlap_comm;
  options.accumulates_whole = keeps_whole_states(units.rule) || (!policy.reduce_every_micro && batch.accumulation > 1);
  const bool mean = config.gradients().op == GradientOp::mean;
  options.scale = 1.0 / static_cast<double>(batch.accumulation * (mean ? num_ranks : 1));
  options.reserve = units.on_cpu;
  if (!units.on_cpu) options.finite_check = gradients::FiniteCheckTime::each_step;
  const int64_t bytes_of_sums = units.shard_numel * static_cast<int64_t>(c10::elementSize(options.accumulate_dtype));
  options.offload = gradient_offload(config, units.rule, bytes_of_sums);
  options.keep_rows = units.on_cpu && !config.runtime().keep_grad && !options.offload &&
                      keeps_rows(config, batch, num_ranks, policy) && units.num_units <= host::Exchange::kMaxOffers / 4;
  return options;
}

/// Classes derived from torch's keep the word in their names.
std::vector<bool> mostly_zero_units(const Config& config, const optim::Rule& rule,
                                    const std::vector<ModuleInfo>& modules,
                                    const std::vector<std::vector<std::string>>& names) {
  const bool ordered = config.runtime().reduction == Reduction::ordered;
  if (!ordered || !config.gradients().sparse || keeps_whole_states(&rule)) return {};
  std::set<std::string> weights;
  for (const ModuleInfo& module : modules) {
    const bool is_embedding = module.type.find("Embedding") != std::string::npos;
    if (is_embedding) weights.insert(module.path.empty() ? "weight" : module.path + ".weight");
  }
  std::vector<bool> found;
  for (const std::vector<std::string>& of_unit : names) {
    found.push_back(
        std::any_of(of_unit.begin(), of_unit.end(), [&](const auto& name) { return weights.contains(name); }));
  }
  return found;
}

int64_t transport_bytes(const std::vector<const sharding::UnitLayout*>& units, const zero::StagePolicy& policy,
                        bool trains) {
  // Ranks of one index on each host gather into memory of malloc's, which keeps it, before a host's ranks spread it.
  const bool gathers_gradients = !policy.shard_optimizer;
  int64_t largest = 0;
  for (const sharding::UnitLayout* unit : units) {
    if (gathers_gradients && !(unit->trainable && trains)) continue;
    const auto type = gathers_gradients ? at::kFloat : unit->dtype;
    largest = std::max(largest, unit->numel * static_cast<int64_t>(c10::elementSize(type)));
  }
  return largest;
}

zero::UnitForecast stepped_unit(const sharding::UnitLayout& layout, std::set<int> groups,
                                const zero::StagePolicy& policy, bool off_device) {
  return {.numel = policy.shard_optimizer ? layout.shard : layout.numel,
          .whole_numel = layout.numel,
          .dtype = layout.dtype,
          .groups = std::move(groups),
          .off_device = off_device};
}

int64_t step_bytes(const std::vector<const sharding::UnitLayout*>& trained,
                   const std::vector<zero::UnitForecast>& stepped, const optim::Rule& rule,
                   const std::vector<ParameterGroup>& groups, const zero::StagePolicy& policy, int num_ranks) {
  std::vector<Hyperparameters> hyper;
  for (const ParameterGroup& group : groups) hyper.push_back(group.hyperparameters);
  int64_t bytes = zero::forecast_step(stepped, rule, hyper, policy, num_ranks);
  if (dynamic_cast<const optim::CompressedRule*>(&rule)) {
    bytes += zero::SignExchange::forecast(trained, num_ranks).messages;
  }
  return bytes;
}

}  // namespace deeptide::engine
