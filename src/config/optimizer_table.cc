// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Optimizers and their hyper-parameters, read from the configuration's one table.
#include "config/optimizer_table.h"

#include <algorithm>
#include <deque>
#include <mutex>

#include "config/table/schema.h"
#include "deeptide/errors.h"
#include "deeptide/hyperparameters.h"

namespace deeptide {
namespace {

using config::Key;
using config::Kind;
using config::Status;
using config::Variant;

const Key& key_of(const std::vector<Key>& keys, std::string_view name) {
  return *std::find_if(keys.begin(), keys.end(), [&](const Key& key) { return key.name == name; });
}

double as_number(const JsonValue& value) {
  if (value.is(JsonKind::boolean)) return value.boolean ? 1.0 : 0.0;
  return value.number;
}

/// Appends what a key of the table holds: one number, or the numbers of a list ("betas": "beta1", "beta2").
void append(const Key& key, std::vector<HyperparameterInfo>& found) {
  HyperparameterInfo info;
  info.name = info.group_key = key.torch_name.empty() ? key.name : key.torch_name;
  info.config_key = key.name;
  info.flag = key.kind == Kind::boolean;
  info.lowest = key.lowest;
  info.highest = key.highest;
  info.highest_excluded = key.highest_excluded;
  if (key.kind != Kind::list) {
    info.fallback = as_number(key.fallback);
    found.push_back(info);
    return;
  }
  const std::string singular = info.name.substr(0, info.name.size() - 1);
  for (size_t i = 0; i < key.length; ++i) {
    info.name = singular + std::to_string(i + 1);
    info.element = static_cast<int>(i);
    info.fallback = key.fallback.items[i].number;
    found.push_back(info);
  }
}

std::vector<OptimizerInfo> read_table() {
  const Key& section = key_of(config::schema().keys, "optimizer");
  std::vector<OptimizerInfo> all;
  for (const Variant& variant : key_of(section.keys, "params").variants) {
    if (variant.later) continue;
    OptimizerInfo info{variant.types.front(), variant.types, {}};
    for (const Key& key : variant.keys) {
      if (key.status == Status::honoured && !key.config_only) append(key, info.hyperparameters);
    }
    all.push_back(std::move(info));
  }
  return all;
}

}  // namespace

std::optional<size_t> OptimizerInfo::find(std::string_view hyperparameter) const {
  for (size_t i = 0; i < hyperparameters.size(); ++i) {
    if (hyperparameters[i].name == hyperparameter) return i;
  }
  return std::nullopt;
}

const std::vector<OptimizerInfo>& optimizers() {
  static const std::vector<OptimizerInfo> all = read_table();
  return all;
}

const OptimizerInfo* find_optimizer(std::string_view type) {
  for (const OptimizerInfo& info : optimizers()) {
    for (const std::string& name : info.types) {
      if (config::same_word(name, type, /*any_case=*/true)) return &info;
    }
  }
  return nullptr;
}

const OptimizerInfo& kept_optimizer_info(const OptimizerInfo& info) {
  static std::mutex mutex;
  static auto* kept = new std::deque<OptimizerInfo>;  // hyper-parameters that programs hold point into it
  const std::lock_guard lock(mutex);
  const auto found = std::find(kept->begin(), kept->end(), info);
  return found == kept->end() ? kept->emplace_back(info) : *found;
}

Hyperparameters::Hyperparameters(const OptimizerInfo& optimizer) : optimizer_(&optimizer) {
  for (const HyperparameterInfo& info : optimizer.hyperparameters) values_.push_back(info.fallback);
}

Hyperparameters::Hyperparameters(std::string_view type) {
  const OptimizerInfo* found = find_optimizer(type);
  std::string known;
  for (const OptimizerInfo& info : optimizers()) {
    for (const std::string& name : info.types) known += (known.empty() ? "" : ", ") + name;
  }
  if (!found) throw ConfigError("optimizer: got \"" + std::string(type) + "\", expected one of " + known);
  *this = Hyperparameters(*found);
}

bool Hyperparameters::has(std::string_view name) const { return optimizer_ && optimizer_->find(name).has_value(); }

Hyperparameters& Hyperparameters::set(std::string_view name, double value) {
  values_[index_of(name)] = value;
  return *this;
}

size_t Hyperparameters::index_of(std::string_view name) const {
  if (const auto index = optimizer_ ? optimizer_->find(name) : std::nullopt) return *index;
  const std::string missing = "no hyper-parameter '" + std::string(name) + "'";
  if (!optimizer_) throw ConfigError("this group has no optimizer, so " + missing);
  std::string known;
  for (const HyperparameterInfo& info : optimizer_->hyperparameters) known += (known.empty() ? "" : ", ") + info.name;
  throw ConfigError(optimizer_->name + ": " + missing + ", expected one of " + known);
}

namespace config {
namespace {

/// Muon's two kinds of groups: matrices, and the rest, which AdamW steps. As in DeepSpeed each has a rate of its own,
/// and "eps" is AdamW's.
void split_muon(const Values& values, OptimizerConfig& optimizer) {
  constexpr double kAdamRate = 3e-4, kLeastNorm = 1e-7;
  const std::string params = "optimizer.params.";
  const auto rate_of = [&](const std::string& key, double absent) {
    return values.given(params + key) ? values.number(params + key) : absent;
  };
  optimizer.rest = optimizer.defaults;
  optimizer.rest.set("use_muon", 0.0).set("lr", rate_of("adam_lr", rate_of("lr", kAdamRate)));
  optimizer.defaults.set("eps", kLeastNorm).set("lr", rate_of("muon_lr", optimizer.defaults.lr()));
}

}  // namespace

OptimizerConfig optimizer_config(const Values& values) {
  OptimizerConfig optimizer;
  const OptimizerInfo* info = find_optimizer(values.word("optimizer.type"));
  if (!info) return optimizer;
  optimizer.type = values.value("optimizer.type").string;
  optimizer.defaults = Hyperparameters(*info);
  for (size_t i = 0; i < info->hyperparameters.size(); ++i) {
    const HyperparameterInfo& hyper = info->hyperparameters[i];
    const JsonValue& value = values.value("optimizer.params." + hyper.config_key);
    optimizer.defaults.set_at(i, as_number(hyper.element < 0 ? value : value.items[hyper.element]));
  }
  if (optimizer.defaults.has("use_muon")) split_muon(values, optimizer);
  // DeepSpeed does so too, whatever adam_w_mode says.
  if (values.word("optimizer.type") == "AdamW") optimizer.defaults.set("decoupled_weight_decay", 1.0);
  return optimizer;
}

}  // namespace config
}  // namespace deeptide
