// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes a C++ module as the engine sees it.
#include <torch/nn/module.h>

#include <utility>

#include "base/json.h"
#include "base/libraries/format.h"
#include "deeptide/binding.h"
#include "deeptide/engine.h"

namespace deeptide {
namespace {

/// Collects every name, also further names of tied parameters, which Module::named_parameters() drops.
void walk(torch::nn::Module& module, const std::string& prefix, ModelDescription& description) {
  const std::string path = prefix.empty() ? "" : prefix.substr(0, prefix.size() - 1);
  description.modules.push_back({path, module.name()});
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    description.parameters.push_back({prefix + item.key(), item.value()});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) description.buffers.push_back({prefix + item.key(), item.value()});
  }
  for (const auto& child : module.named_children()) walk(*child.value(), prefix + child.key() + ".", description);
}

/// Errors: ConfigError for a policy of activations, for which a model in C++ has nothing to take over.
void refuse_policy(const Config& config) {
  const JsonValue section = parse_json(binding::section_text(config, "activation_checkpointing"), "the section");
  const std::string policy = section.find("policy")->value.string;
  const bool has_budget = !section.find("memory")->value.is(JsonKind::null);
  if (!has_budget && policy != "recompute" && policy != "host") return;
  throw ConfigError(
      "activation_checkpointing.policy is \"" + (has_budget ? "auto" : policy) +
      "\", and the model is a C++ module, whose blocks only Python can recompute: leave policy and memory "
      "out, and call the blocks by deeptide::recompute");
}

/// Errors: ConfigError for axes, along which Python cuts models as they are.
void refuse_axes(const Config& config) {
  for (const auto& [section, key] : {std::pair{"parallel", "pipeline"}, std::pair{"parallel", "tensor"},
                                     std::pair{"tensor_parallel", "autotp_size"}}) {
    const JsonValue parsed = parse_json(binding::section_text(config, section), "the section");
    const JsonValue& found = parsed.find(key)->value;
    const JsonValue& value = found.is(JsonKind::object) ? found.find("stages")->value : found;
    if (value.is(JsonKind::null) || value.number <= 1) continue;
    throw ConfigError(
        format_text("{}.{} is {}, and the model is a C++ module, which is not cut as it is: make a "
                    "PipelineModule of its layers, or take the layers of a TensorTeam, and leave the key out",
                    section, key, value.number));
  }
}

}  // namespace

ModelDescription describe(torch::nn::Module& model) {
  ModelDescription description;
  walk(model, "", description);
  return description;
}

Engine initialize(torch::nn::Module& model, const Config& config, const InitOptions& options) {
  refuse_policy(config);
  refuse_axes(config);
  InitOptions looking = options;
  if (!looking.describe) looking.describe = [&model] { return describe(model); };
  return Engine(describe(model), config, looking);
}

}  // namespace deeptide
