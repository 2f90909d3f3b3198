// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares a fresh description with the bound parameters.
#include "engine/bind/live_model.h"

#include "base/libraries/format.h"
#include "base/log.h"
#include "engine/design/logical_parameters.h"
#include "sharding/gate.h"

namespace deeptide::engine {

std::vector<NamedTensor> LooseTensors::all() const {
  std::vector<NamedTensor> tensors = buffers;
  tensors.insert(tensors.end(), replaced.begin(), replaced.end());
  tensors.insert(tensors.end(), added.begin(), added.end());
  return tensors;
}

std::vector<std::string> LooseTensors::terms() const {
  std::vector<std::string> lines;
  for (const LateTie& tie : tied) {
    lines.push_back(format_text("parameter '{}', which is '{}' now", tie.name, tie.to.parameter->name));
  }
  const auto text_of = [](const NamedTensor& now, const char* what) {
    return format_text("{} of shape [{}], {}", what, join_text(now.tensor.sizes(), ", "),
                       c10::toString(now.tensor.scalar_type()));
  };
  for (const NamedTensor& now : replaced) {
    lines.push_back(
        format_text("parameter '{}', which is another tensor than at initialize, {}", now.name, text_of(now, "one")));
  }
  for (const auto* tensors : {&buffers, &added}) {
    for (const NamedTensor& now : *tensors) {
      if (!sharding::has_gate_key(now.tensor)) continue;
      lines.push_back(format_text("'{}', {}", now.name, text_of(now, "a view of a sharded parameter")));
    }
  }
  return lines;
}

LiveNames::LiveNames(const LooseTensors& loose) {
  for (const auto* tensors : {&loose.replaced, &loose.added}) {
    for (const NamedTensor& tensor : *tensors) elsewhere_.insert(tensor.name);
  }
  for (const LateTie& tie : loose.tied) {
    elsewhere_.insert(tie.name);
    ties_.insert({tie.to.parameter, {tie.name, tie.to.tensor}});
  }
}

std::vector<sharding::Alias> LiveNames::of(const sharding::Parameter& p) const {
  std::vector<sharding::Alias> names;
  if (!elsewhere_.contains(p.name)) names.push_back({p.name, 0});
  for (const auto& alias : p.aliases) {
    if (!elsewhere_.contains(alias.name)) names.push_back(alias);
  }
  const auto [first, last] = ties_.equal_range(&p);
  for (auto tie = first; tie != last; ++tie) names.push_back(tie->second);
  return names;
}

LiveModel::LiveModel(const BoundModel& bound, ModelDescription first, Describe describe, Buffers buffers)
    : bound_(bound), describe_(std::move(describe)), buffers_(std::move(buffers)) {
  if (!buffers_) seen_buffers_ = first.buffers;
  if (!describe_) describe_ = [first = std::move(first)] { return first; };
}

LooseTensors LiveModel::look() {
  const ModelDescription description = describe_();
  LooseTensors loose{description.buffers, {}, {}};
  if (!buffers_) seen_buffers_ = description.buffers;
  for (const NamedTensor& now : description.parameters) {
    const BoundName bound = bound_.find(now.name);
    if (bound.parameter && now.tensor.is_same(bound.parameter->tensors[bound.tensor])) continue;
    if (const BoundName other = bound_.find(now.tensor); other.parameter) {
      loose.tied.push_back({now.name, other});
      tell(now.name, "' is '" + other.parameter->name + "' now: it is trained, saved and exported as that parameter");
      continue;
    }
    const bool has_name = bound.parameter && bound.parameter->name == now.name;  // not one of its further names
    (has_name ? loose.replaced : loose.added).push_back(now);
    if (!has_name && stays_whole(now.tensor)) continue;
    const char* was = bound.parameter ? "' is another tensor than at initialize" : "' was added after initialize";
    tell(now.name, std::string(was) +
                       ": it is saved and exported as it is, but this engine does not train it. Write values "
                       "into a parameter with copy_() under no_grad; to train a new one, call engine.rebuild().");
  }
  foreign_ = loose.replaced;
  foreign_.insert(foreign_.end(), loose.added.begin(), loose.added.end());
  return loose;
}

void LiveModel::check_trained() {
  if (stale_.exchange(false)) look();
  for (const NamedTensor& now : foreign_) {
    const bool reached = now.tensor.requires_grad() && now.tensor.is_leaf() && now.tensor.grad().defined();
    TORCH_CHECK_VALUE(!reached, "parameter '", now.name,
                      "' is new since initialize, and backward gave it a gradient that no step of this engine would "
                      "use. Call engine.rebuild() on every rank when the model's parameters have changed, as "
                      "load_state_dict(assign=True) does, before the next forward (now: engine.zero_grad() first), or "
                      "give it requires_grad=False.");
  }
}

void LiveModel::tell(const std::string& name, const std::string& what) {
  if (told_.insert(name).second) log(LogLevel::warning, "parameter '" + name + what);
}

}  // namespace deeptide::engine
