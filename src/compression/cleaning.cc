// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes final what training left out or rounded; shapes shrink where others follow.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/libraries/format.h"
#include "compression/model.h"

namespace deeptide {

using at::Tensor;
using compression::Group;
using compression::Layer;
using compression::Pruning;

namespace {

/// Writes what a layer's technique makes of its parameters. Returns the mask by which others follow.
Tensor prune(Layer& layer, const Group& group, bool shrinks) {
  const auto found = std::ranges::find(layer.pruning, group.technique, &Pruning::technique);
  if (found == layer.pruning.end()) {
    throw ConfigError(
        format_text("redundancy_clean: {} has no {}; it was made final already", layer.name(), group.technique));
  }
  const Tensor mask = found->mask(layer.module()).detach().to(at::kBool).view(-1);
  if (!shrinks) {
    Tensor weight = layer.parameter("weight"), bias = layer.parameter("bias");
    found->apply(layer.module(), weight, bias);
    layer.set("weight", weight);
    if (bias.defined()) layer.set("bias", bias);
  } else if (group.technique == "head_pruning") {
    layer.keep_inputs(mask.repeat_interleave(layer.parameter("weight").size(1) / found->heads));
  } else {
    layer.keep_outputs(mask);
  }
  found->forget(layer.module());
  layer.pruning.erase(found);
  return mask;
}

/// A module that takes or makes what was removed.
void follow_mask(const Layer& other, const Group& group, const Tensor& mask) {
  if (group.technique != "head_pruning") return other.keep_inputs(mask);
  other.keep_outputs(mask.repeat_interleave(other.parameter("weight").size(0) / mask.numel()));
}

}  // namespace

void Compression::redundancy_clean() {
  const at::NoGradGuard no_grad;
  for (const Group& group : impl_->groups) {
    for (size_t number = 0; number < group.modules.size(); ++number) {
      const auto related = group.related.empty() ? std::vector<std::string>() : group.related[number];
      std::vector<Tensor> masks;
      for (const Layer& found : compression::matching(impl_->model, group, group.modules[number])) {
        Layer& layer = impl_->layer_of(found.module(), found.name());
        if (group.technique == compression::kWeights) {
          if (layer.weights) layer.set("weight", layer.weights->values(layer.parameter("weight")));
          layer.weights.reset();
        } else if (group.technique != compression::kInputs) {
          masks.push_back(prune(layer, group, !related.empty()));
        }
      }
      for (const std::string& pattern : related) {
        const auto others = compression::matching(impl_->model, group, pattern, /*is_related=*/true);
        if (others.size() != masks.size()) {
          throw ConfigError(
              format_text("{}.related_modules: '{}' names {} modules, expected one for each of the {} "
                          "that are pruned",
                          group.path, pattern, others.size(), masks.size()));
        }
        for (size_t i = 0; i < others.size(); ++i) follow_mask(others[i], group, masks[i]);
      }
    }
  }
  for (const Layer& layer : impl_->layers) layer.restore();
}

}  // namespace deeptide
