// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares a fresh description with the bound parameters.
#include "engine/live_model.h"

#include "base/log.h"

namespace deeptide::engine {

std::vector<NamedTensor> LooseTensors::all() const {
  std::vector<NamedTensor> tensors = buffers;
  tensors.insert(tensors.end(), replaced.begin(), replaced.end());
  tensors.insert(tensors.end(), added.begin(), added.end());
  return tensors;
}

LiveModel::LiveModel(const BoundModel& bound, ModelDescription first, std::function<ModelDescription()> describe)
    : bound_(bound), describe_(std::move(describe)) {
  if (!describe_) describe_ = [first = std::move(first)] { return first; };
}

LooseTensors LiveModel::look() {
  const ModelDescription description = describe_();
  LooseTensors loose{description.buffers, {}, {}};
  for (const NamedTensor& now : description.parameters) {
    const BoundName bound = bound_.find(now.name);
    if (bound.parameter && now.tensor.is_same(bound.parameter->tensors[bound.tensor])) continue;
    const bool has_name = bound.parameter && bound.parameter->name == now.name;  // not one of its further names
    (has_name ? loose.replaced : loose.added).push_back(now);
    if (!told_.insert(now.name).second) continue;
    log(LogLevel::warning,
        "parameter '" + now.name +
            (bound.parameter ? "' is another tensor than at initialize" : "' was added to the model after initialize") +
            ": it is saved and exported as it is, but this engine does not train it. Write values "
            "into a parameter with copy_() under no_grad; to train a new one, call initialize again.");
  }
  return loose;
}

}  // namespace deeptide::engine
