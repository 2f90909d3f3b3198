// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Config: a text, checked against the table, whose keys then fill their fields.
#include "deeptide/config.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/json.h"
#include "config/base64.h"
#include "config/batch.h"
#include "config/check/rules.h"
#include "config/check/translate.h"
#include "config/check/validate.h"
#include "config/elasticity.h"
#include "config/optimizer_table.h"
#include "deeptide/errors.h"

namespace deeptide {
namespace {

using config::Values;

// A program may change its folder before a path of the configuration is used.
void make_absolute(std::string& path) {
  if (!path.empty()) path = std::filesystem::absolute(path).string();
}

void make_paths_absolute(Config::Sections& sections) {
  const auto all = [](std::vector<std::string>& folders) {
    std::for_each(folders.begin(), folders.end(), make_absolute);
  };
  all(std::get<OffloadOptimizerConfig>(sections).folders);
  all(std::get<OffloadParamConfig>(sections).folders);
  all(std::get<PlacementConfig>(sections).folders);
  all(std::get<CheckpointConfig>(sections).folders);
  make_absolute(std::get<CheckpointConfig>(sections).preempt_folder);
  make_absolute(std::get<TensorboardConfig>(sections).output_path);
  make_absolute(std::get<CsvMonitorConfig>(sections).output_path);
  make_absolute(std::get<JsonlMonitorConfig>(sections).output_path);
  make_absolute(std::get<TimelineConfig>(sections).output_path);
  auto& profile = std::get<FlopsProfilerConfig>(sections).output_file;
  if (profile) make_absolute(*profile);
}

// Every key that is bound fills its field; a section that is off fills its fields as well.
void fill(const Values& values, Config::Sections& sections) {
  for (const auto& [path, entry] : values.entries()) {
    const config::Key& key = *entry.key;
    if (key.binding) key.binding->fill(key, values.value(path), sections);
  }
  std::get<OptimizerConfig>(sections) = config::optimizer_config(values);
  config::translate(values, sections);
  auto& precision = std::get<PrecisionConfig>(sections);
  precision.min_loss_scale = std::max<int64_t>(precision.min_loss_scale, 1);
  auto& offload = std::get<OffloadOptimizerConfig>(sections);
  offload.measures_ratio =
      offload.device != OffloadDevice::none && values.at("zero_optimization.offload_optimizer.ratio").automatic;
  auto& elasticity = std::get<ElasticityConfig>(sections);
  elasticity.sizes_given =
      values.given("elasticity.max_train_batch_size") && values.given("elasticity.micro_batch_sizes");
}

// Decodes text that is base64 of an object; returns any other text unchanged.
std::string decoded(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const auto bytes = config::decode_base64_url(text);
  if (!bytes) return std::string(text);
  const size_t first = bytes->find_first_not_of(kBlanks);
  const bool object = first != std::string::npos && (*bytes)[first] == '{';
  return object ? *bytes : std::string(text);
}

// RFC 7396: objects merge, null removes, any other value replaces.
void merge(JsonValue& target, const JsonValue& patch) {
  if (!patch.is(JsonKind::object) || !target.is(JsonKind::object)) {
    target = patch;
    return;
  }
  for (const JsonMember& member : patch.members) {
    const auto found = std::find_if(target.members.begin(), target.members.end(),
                                    [&](const JsonMember& m) { return m.key == member.key; });
    if (member.value.is(JsonKind::null)) {
      if (found != target.members.end()) target.members.erase(found);
    } else if (found != target.members.end()) {
      merge(found->value, member.value);
    } else {
      target.members.push_back(member);
    }
  }
}

}  // namespace

Config::Config() : Config("{}", "<default>") {}

Config::Config(std::string text, std::string origin) : origin_(std::move(origin)), text_(std::move(text)) {
  const JsonValue root = parse_json(text_, origin_);
  if (!root.is(JsonKind::object)) {
    throw ConfigError(origin_ + ":" + std::to_string(root.line) + ": expected an object of keys in braces, got " +
                      to_text(root).substr(0, 60));
  }
  config::Problems problems(origin_);
  const Values values = config::validate(root, problems, decisions_);
  config::check_rules(values, std::get<PlacementConfig>(sections_), problems);
  problems.raise();
  fill(values, sections_);
  make_paths_absolute(sections_);
  if (elasticity().enabled) {
    config::check_scheduler_contract(elasticity(), std::getenv("DEEPSPEED_ELASTICITY_CONFIG"));
  }
  config::note_decisions(values, decisions_);
  config::note_translations(values, decisions_);
}

Config Config::from_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file.is_open()) text << file.rdbuf();
  if (!file.is_open() || text.bad()) {
    throw ConfigError(path + ": cannot read this file; expected a string path to an existing deepspeed config");
  }
  return from_text(text.str(), path);
}

Config Config::from_text(std::string_view text, const std::string& origin) { return Config(decoded(text), origin); }

Config Config::with(std::string_view patch) const {
  JsonValue root = parse_json(text_, origin_);
  merge(root, parse_json(patch, "<patch>"));
  return Config(to_text(root), origin_ + " (patched)");
}

Config Config::without_scheduler() const {
  Config copy = *this;
  std::get<SchedulerConfig>(copy.sections_) = {};
  copy.decisions_.emplace_back("scheduler: the caller's lr_scheduler replaces the configuration's");
  return copy;
}

BatchSizes Config::batch_sizes(int64_t world_size) const {
  if (const auto& asked = batch().data_parallel_size; asked && world_size > 0 && *asked != world_size) {
    throw ConfigError(origin_ + ": data_parallel_size: got " + std::to_string(*asked) +
                      ", and ranks that take different samples are " + std::to_string(world_size) +
                      ": all ranks over those of pipeline and tensor; set it to that, or leave it out");
  }
  if (!elasticity().enabled) return config::batch_sizes(batch(), world_size, origin_);
  if (world_size <= 0) {
    throw ConfigError(origin_ + ": the world size: " + std::to_string(world_size) +
                      " has to be greater than 0; give at least 1");
  }
  const ElasticBatch elastic = config::elastic_batch(elasticity(), world_size);
  return {elastic.train, elastic.micro, elastic.train / (elastic.micro * world_size)};
}

DataType Config::compute_dtype() const {
  if (precision().bf16) return DataType::bf16;
  return precision().fp16 ? DataType::fp16 : DataType::fp32;
}

std::string_view scheduler_type(const SchedulerConfig& scheduler) {
  return std::visit(
      [](const auto& chosen) -> std::string_view {
        if constexpr (requires { chosen.kType; }) {
          return chosen.kType;
        } else {
          return "";
        }
      },
      scheduler);
}

}  // namespace deeptide
