// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Config: from text through the table to fields.
#include "deeptide/config.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/json.h"
#include "config/base64.h"
#include "config/elasticity.h"
#include "config/optimizer_table.h"
#include "config/rules.h"
#include "config/validate.h"
#include "deeptide/errors.h"

namespace deeptide {
namespace {

using config::Kind;
using config::Values;

const std::string kOptimizerParams = "optimizer.params.";
const std::string kSchedulerParams = "scheduler.params.";

DataType data_type(const std::string& name) {
  if (name == "bf16") return DataType::bf16;
  return name == "fp16" ? DataType::fp16 : DataType::fp32;
}

std::optional<DataType> maybe_type(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return data_type(name);
}

BatchConfig batch_config(const Values& values) {
  return {values.maybe_integer("train_batch_size"), values.maybe_integer("train_micro_batch_size_per_gpu"),
          values.maybe_integer("gradient_accumulation_steps")};
}

// Where one parameter's value comes from another's: the second of OneCycle's halves, the rate after a warm-up.
void derive_params(const Values& values, SchedulerConfig& scheduler, std::vector<std::string>& decisions) {
  const auto copy = [&](const char* to, const char* from) { scheduler.params.try_emplace(to, scheduler.params[from]); };
  if (scheduler.type == "OneCycle") {
    copy("cycle_second_step_size", "cycle_first_step_size");
    copy("cycle_second_stair_count", "cycle_first_stair_count");
  }
  const std::string rate = kSchedulerParams + "warmup_max_lr";
  if (scheduler.type != "WarmupDecayLR" || !values.at(rate).automatic || values.word("optimizer.type").empty()) return;
  const double lr = values.number(kOptimizerParams + "lr");
  scheduler.params["warmup_max_lr"] = lr;
  const std::string line = values.at(rate).shown + ": \"auto\" became ";
  for (std::string& decision : decisions) {
    if (decision.rfind(line, 0) == 0) decision = line + to_text(JsonValue(lr)) + " (optimizer.params.lr)";
  }
}

SchedulerConfig scheduler_config(const Values& values, std::vector<std::string>& decisions) {
  SchedulerConfig scheduler;
  scheduler.type = values.word("scheduler.type");
  if (scheduler.type.empty()) return scheduler;
  for (const auto& [path, entry] : values.entries()) {
    if (path.compare(0, kSchedulerParams.size(), kSchedulerParams) != 0) continue;
    if (entry.key->status != config::Status::honoured) continue;
    const JsonValue& value = values.value(path);
    if (value.is(JsonKind::null)) continue;
    if (entry.key->kind == Kind::word) {
      scheduler.names[entry.key->name] = value.string;
    } else {
      scheduler.params[entry.key->name] = value.is(JsonKind::boolean) ? value.boolean : value.number;
    }
  }
  derive_params(values, scheduler, decisions);
  return scheduler;
}

ZeroConfig zero_config(const Values& values) {
  const std::string zero = "zero_optimization.";
  ZeroConfig config;
  config.stage = static_cast<int>(values.integer(zero + "stage"));
  config.reduce_bucket_size = values.integer(zero + "reduce_bucket_size");
  config.allgather_bucket_size = values.integer(zero + "allgather_bucket_size");
  config.overlap_comm = values.flag(zero + "overlap_comm");
  config.prefetch_bucket_size = values.integer(zero + "stage3_prefetch_bucket_size");
  config.param_persistence_threshold = values.integer(zero + "stage3_param_persistence_threshold");
  config.model_persistence_threshold = values.integer(zero + "stage3_model_persistence_threshold");
  config.max_live_parameters = values.maybe_integer(zero + "stage3_max_live_parameters");
  config.max_reuse_distance = values.maybe_integer(zero + "stage3_max_reuse_distance");
  config.gather_16bit_weights_on_model_save = values.flag(zero + "stage3_gather_16bit_weights_on_model_save");
  return config;
}

ElasticityConfig elasticity_config(const Values& values) {
  const std::string elasticity = "elasticity.";
  ElasticityConfig config;
  config.enabled = values.flag(elasticity + "enabled");
  config.sizes_given =
      values.given(elasticity + "max_train_batch_size") && values.given(elasticity + "micro_batch_sizes");
  config.max_train_batch_size = values.integer(elasticity + "max_train_batch_size");
  config.micro_batch_sizes.clear();
  for (const JsonValue& size : values.value(elasticity + "micro_batch_sizes").items) {
    config.micro_batch_sizes.push_back(Values::as_integer(size));
  }
  config.min_gpus = values.integer(elasticity + "min_gpus");
  config.max_gpus = values.integer(elasticity + "max_gpus");
  config.num_gpus_per_node = values.integer(elasticity + "num_gpus_per_node");
  config.model_parallel_size = values.integer(elasticity + "model_parallel_size");
  config.version = values.number(elasticity + "version");
  config.prefer_larger_batch = values.flag(elasticity + "prefer_larger_batch");
  config.ignore_non_elastic_batch_info = values.flag(elasticity + "ignore_non_elastic_batch_info");
  return config;
}

RuntimeConfig runtime_config(const Values& values) {
  RuntimeConfig config;
  config.comm_timeout_s = values.number("deeptide.comm_timeout");
  config.ordered_reduction = values.word("deeptide.reduction") == "ordered";
  config.reduce_thread = values.word("deeptide.reduce_thread");
  config.shared_memory = values.flag("deeptide.shared_memory");
  config.tune_allocator = values.flag("deeptide.tune_allocator");
  config.unit_size = values.integer("deeptide.unit_size");
  config.seed = static_cast<uint64_t>(values.integer("deeptide.seed"));
  return config;
}

void fill(const Values& values, Config& config) {
  config.batch = batch_config(values);
  config.optimizer = config::optimizer_config(values);
  config.scheduler = scheduler_config(values, config.decisions);
  config.zero = zero_config(values);
  config.elasticity = elasticity_config(values);
  if (config.elasticity.enabled) {
    config::check_scheduler_contract(config.elasticity, std::getenv("DEEPSPEED_ELASTICITY_CONFIG"));
  }
  config.runtime = runtime_config(values);
  config.bf16 = values.flag("bf16.enabled");
  config.communication_dtype = maybe_type(values.word("communication_data_type"));
  config.gradient_accumulation_dtype = maybe_type(values.word("data_types.grad_accum_dtype"));
  config.gradient_clipping = values.number("gradient_clipping");
  config.gradient_mean = values.word("gradient_allreduce_op") == "mean";
  config.steps_per_print = values.maybe_integer("steps_per_print");
  config.dataloader_drop_last = values.flag("dataloader_drop_last");
  config.dump_state = values.flag("dump_state");
}

// The text itself, or what it encodes: text that is not an object may be base64 of one.
std::string decoded(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const auto bytes = config::decode_base64_url(text);
  if (!bytes) return std::string(text);
  const size_t first = bytes->find_first_not_of(kBlanks);
  const bool object = first != std::string::npos && (*bytes)[first] == '{';
  return object ? *bytes : std::string(text);
}

}  // namespace

Config::Config() : origin("<default>"), text("{}") {}

Config Config::from_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file.is_open()) text << file.rdbuf();
  if (!file.is_open() || text.bad()) {
    throw ConfigError(path + ": cannot read this file; expected a string path to an existing deepspeed config");
  }
  return from_text(text.str(), path);
}

Config Config::from_text(std::string_view text, const std::string& origin) {
  Config config;
  config.origin = origin;
  config.text = decoded(text);
  const JsonValue root = parse_json(config.text, origin);
  if (!root.is(JsonKind::object)) {
    throw ConfigError(origin + ":" + std::to_string(root.line) + ": expected an object of keys in braces, got " +
                      to_text(root).substr(0, 60));
  }
  config::Problems problems(origin);
  const Values values = config::validate(root, problems, config.decisions);
  config::check_rules(values, problems);
  problems.raise();
  fill(values, config);
  config::note_decisions(values, config.decisions);
  return config;
}

DataType Config::compute_dtype() const {
  if (bf16) return DataType::bf16;
  return fp16 ? DataType::fp16 : DataType::fp32;
}

}  // namespace deeptide
