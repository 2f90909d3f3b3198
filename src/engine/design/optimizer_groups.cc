// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Splits Muon's parameters, and compares hyper-parameters with their ranges.
#include "engine/design/optimizer_groups.h"

#include <cmath>
#include <map>

#include "base/libraries/format.h"
#include "optim/rules/two_pass_rule.h"

namespace deeptide::engine {

using at::Tensor;

namespace {

/// Names of the weights of LibTorch's embeddings.
std::set<std::string> embeddings_of(const ModelDescription& model) {
  std::set<std::string> names;
  for (const ModuleInfo& module : model.modules) {
    if (module.type == "torch::nn::EmbeddingImpl" || module.type == "torch::nn::EmbeddingBagImpl") {
      names.insert(module.path.empty() ? "weight" : module.path + ".weight");
    }
  }
  return names;
}

/// Every trainable name is in one of two groups; the names of a tied parameter are in the same: it is a matrix if it is
/// one by all of them.
std::vector<ParameterGroup> muon_groups(const ModelDescription& model, const OptimizerConfig& optimizer) {
  using Memory = std::pair<const void*, int64_t>;
  std::map<Memory, bool> is_matrix;
  const auto memory_of = [](const Tensor& tensor) {
    const bool stored = tensor.has_storage() && tensor.numel() > 0;
    return stored ? Memory{tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()}
                  : Memory{tensor.unsafeGetTensorImpl(), 0};
  };
  const std::set<std::string> embeddings = embeddings_of(model);
  for (const auto& [name, tensor] : model.parameters) {
    if (!tensor.defined()) continue;
    const auto [place, is_new] = is_matrix.emplace(memory_of(tensor), true);
    place->second = place->second && !embeddings.contains(name) && optim::is_muon_matrix(name, tensor.sizes());
  }
  ParameterGroup matrices{{}, optimizer.defaults}, rest{{}, optimizer.rest};
  for (const auto& [name, tensor] : model.parameters) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    const bool muon = is_matrix.at(memory_of(tensor)) && optimizer.defaults.get("use_muon") != 0.0;
    (muon ? matrices : rest).parameters.push_back(name);
  }
  std::vector<ParameterGroup> groups;
  for (ParameterGroup* group : {&matrices, &rest}) {
    if (!group->parameters.empty()) groups.push_back(std::move(*group));
  }
  return groups;
}

std::string range_text(const HyperparameterInfo& info) {
  if (info.highest) {
    return format_text("a number in [{:g}, {:g}{}", info.lowest.value_or(-INFINITY), *info.highest,
                       info.highest_excluded ? ")" : "]");
  }
  return info.lowest ? format_text("a number of at least {:g}", *info.lowest) : "a finite number";
}

bool fits(double value, const HyperparameterInfo& info) {
  if (!std::isfinite(value) || (info.lowest && value < *info.lowest)) return false;
  return !info.highest || (info.highest_excluded ? value < *info.highest : value <= *info.highest);
}

}  // namespace

std::vector<ParameterGroup> optimizer_groups(const ModelDescription& model, const Config& config,
                                             const InitOptions& options) {
  if (!options.groups.empty()) return options.groups;
  const OptimizerConfig& optimizer = config.optimizer();
  if (optimizer.rest.optimizer()) {
    if (auto groups = muon_groups(model, optimizer); !groups.empty()) return groups;
  }
  return {ParameterGroup{{}, optimizer.defaults}};
}

std::vector<ParameterGroup> named_groups(const std::vector<ParameterGroup>& groups) {
  const bool all = groups.size() == 1 && groups.front().parameters.empty();
  return all ? std::vector<ParameterGroup>() : groups;
}

void check_hyperparameters(const Hyperparameters& hyper, const OptimizerInfo* optimizer) {
  const auto name = [](const OptimizerInfo* info) { return info ? info->name : "no optimizer"; };
  TORCH_CHECK_VALUE(hyper.optimizer() == optimizer, "hyper-parameters of a group: got ", name(hyper.optimizer()),
                    "'s, expected ", name(optimizer), "'s as the engine's optimizer is");
  const size_t count = optimizer ? optimizer->hyperparameters.size() : 0;
  for (size_t i = 0; i < count; ++i) {
    const HyperparameterInfo& info = optimizer->hyperparameters[i];
    TORCH_CHECK_VALUE(fits(hyper[i], info), "hyper-parameters of a group: ", info.name, " is ", hyper[i], ", expected ",
                      range_text(info));
  }
}

void check_matrices(const std::vector<sharding::Unit*>& units, const optim::Rule& rule,
                    const std::vector<Hyperparameters>& groups) {
  for (const sharding::Unit* unit : units) {
    for (const sharding::Parameter& p : unit->parameters()) {
      const bool as_matrix = rule.reach(groups.at(p.group)) == optim::Reach::whole_parameter;
      TORCH_CHECK_VALUE(!as_matrix || p.tensors.front().dim() >= 2, "parameter '", p.name, "' has shape ",
                        p.tensors.front().sizes(), ", but ", rule.name(),
                        " steps whole matrices, of two dimensions or ",
                        "more; put it into a group with use_muon=False, which AdamW steps");
    }
  }
}

}  // namespace deeptide::engine
