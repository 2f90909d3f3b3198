// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes a C++ module as the engine sees it.
#include <torch/nn/module.h>

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

}  // namespace

ModelDescription describe(torch::nn::Module& model) {
  ModelDescription description;
  walk(model, "", description);
  return description;
}

Engine initialize(torch::nn::Module& model, const Config& config, const InitOptions& options) {
  InitOptions looking = options;
  if (!looking.describe) looking.describe = [&model] { return describe(model); };
  return Engine(describe(model), config, looking);
}

}  // namespace deeptide
