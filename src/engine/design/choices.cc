// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the choices off the configuration.
#include "engine/design/choices.h"

#include <algorithm>

#include "optim/rules/custom_rule.h"

namespace deeptide::engine {

using at::ScalarType;

std::shared_ptr<const optim::Rule> rule_of(const Config& config, const InitOptions& options) {
  if (options.custom) return std::make_shared<optim::CustomRule>(options.custom->info());
  const std::string type = options.optimizer.value_or(config.optimizer().type);
  if (type.empty()) return nullptr;
  return {std::shared_ptr<void>(), &optim::find_rule(type)};  // which lives as long as the library
}

bool keeps_whole_states(const optim::Rule* rule) { return rule && rule->compressed(); }

bool joins_slices(const optim::Rule* rule) {
  return rule && (rule->matrices() || (rule->compressed() && rule->norms()));
}

bool is_callers(const optim::Rule* rule) { return rule && rule->is_callers(); }

bool steps_elements(const optim::Rule& rule) {
  return rule.reach(Hyperparameters(rule.info())) == optim::Reach::elementwise && !keeps_whole_states(&rule);
}

ScalarType scalar_type(DataType type) {
  static constexpr ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};
  return kTypes[static_cast<int>(type)];
}

at::ScalarType reduce_type(const Config& config) {
  return scalar_type(config.precision().communication_dtype.value_or(config.compute_dtype()));
}

int quantized_bits(const Config& config) {
  const auto unless_given = config.zero().quantized_gradients ? QuantizedGradients::int4 : QuantizedGradients::off;
  return static_cast<int>(config.runtime().quantized_gradients.value_or(unless_given));
}

at::ScalarType accumulate_type(const Config& config) {
  const PrecisionConfig& precision = config.precision();
  const DataType unless_given = precision.rounds_masters() ? config.compute_dtype() : DataType::fp32;
  return scalar_type(precision.gradient_accumulation_dtype.value_or(unless_given));
}

zero::StateTypes state_types(const Config& config, const optim::Rule* rule) {
  zero::StateTypes types;
  if (rule == nullptr) return types;
  types.rounded_masters = config.precision().rounds_masters();
  types.rounded_moments = config.precision().rounds_moments();
  types.lends_masters = is_callers(rule);
  types.packed_masters = config.runtime().packed_states;
  if (config.runtime().moment_dtype == DataType::bf16) types.moments_seed = config.runtime().seed;
  return types;
}

double share_beyond(const MemoryShare& memory, int64_t total, int64_t half_block) {
  if (memory.bytes == 0) return 1.0 - memory.fraction;
  const int64_t allowed = memory.of(total);
  if (allowed == total) return 0.0;
  const int64_t safe = std::max<int64_t>(0, allowed - half_block);
  return 1.0 - static_cast<double>(safe) / static_cast<double>(total);
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

bool places_parameters(const Config& config, at::Device device) {
  if (has_parameters_in_files(config)) return true;
  if (device.is_cpu()) return false;
  return config.placement().parameters_on_device || config.offload_param().device != OffloadDevice::none;
}

double share_on_host(const Config& config, at::Device device) {
  const OffloadOptimizerConfig& asked = config.offload_optimizer();
  if (config.placement().optimizer_states) {
    return device.is_cpu() || !config.placement().optimizer_states_on_device ? 0.0 : 1.0;
  }
  return device.is_cpu() || asked.device == OffloadDevice::none ? 0.0 : asked.ratio;
}

bool measures_ratio(const Config& config) {
  return config.offload_optimizer().measures_ratio && !config.placement().optimizer_states;
}

/// Whether ranks of one host may share what would be whole. A rank that waits for one of the host's channels moves
/// nothing on the others, so large gathers and rounds would wait on each other there.
bool may_share_memory(const Config& config) {
  return config.runtime().shared_memory && !has_parameters_in_files(config);
}

}  // namespace deeptide::engine
