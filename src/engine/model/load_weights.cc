// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies weights that others saved into a module.
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include <set>

#include "deeptide/engine.h"
#include "deeptide/errors.h"
#include "deeptide/weights.h"

namespace deeptide {
namespace {

constexpr size_t kMostMissing = 5;

std::string some_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMostMissing); ++i) text += (i == 0 ? "'" : ", '") + names[i] + "'";
  return text + (names.size() > kMostMissing ? " and " + std::to_string(names.size() - kMostMissing) + " more" : "");
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text;
  for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "(" + text + ")";
}

}  // namespace

LoadedWeights load_weights(torch::nn::Module& model, const std::string& path, bool strict) {
  ModelDescription description = describe(model);
  std::vector<NamedTensor> targets = description.parameters;
  targets.insert(targets.end(), description.buffers.begin(), description.buffers.end());
  return load_weights(targets, path, strict);
}

LoadedWeights load_weights(const std::vector<NamedTensor>& targets, const std::string& path, bool strict) {
  const at::NoGradGuard no_grad;
  WeightFile file(path);
  std::vector<std::string> names;
  for (const NamedTensor& target : targets) names.push_back(target.name);
  file.fit(names);
  LoadedWeights result;
  std::set<const c10::StorageImpl*> loaded;
  std::set<std::string> known;
  std::vector<NamedTensor> sources;  // as targets; undefined where the file has none
  for (const NamedTensor& target : targets) {
    known.insert(target.name);
    sources.push_back({target.name, file.has(target.name) ? file.tensor(target.name) : at::Tensor()});
    if (!sources.back().tensor.defined()) continue;
    loaded.insert(target.tensor.storage().unsafeGetStorageImpl());
    if (sources.back().tensor.sizes() != target.tensor.sizes()) {
      throw CheckpointError("'" + target.name + "' has shape " + shape_text(target.tensor.sizes()) +
                            " in the model and " + shape_text(sources.back().tensor.sizes()) + " in " + path);
    }
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!sources[i].tensor.defined() && !loaded.contains(targets[i].tensor.storage().unsafeGetStorageImpl())) {
      result.missing.push_back(targets[i].name);
    }
  }
  for (const std::string& name : file.names()) {
    if (!known.contains(name)) result.unexpected.push_back(name);
  }
  if (strict && !(result.missing.empty() && result.unexpected.empty())) {
    std::string text = "the weights in " + path + " are not this model's:";
    if (!result.missing.empty()) text += " they lack " + some_of(result.missing);
    if (!result.unexpected.empty()) {
      text += std::string(result.missing.empty() ? "" : ", and") + " the model lacks " + some_of(result.unexpected);
    }
    throw CheckpointError(text + "; pass strict = false to load what both have");
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (sources[i].tensor.defined()) targets[i].tensor.copy_(sources[i].tensor);
  }
  return result;
}

}  // namespace deeptide
