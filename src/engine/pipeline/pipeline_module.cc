// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts a list of layers into stages, and makes those of this rank's.
#include <ATen/Context.h>

#include <algorithm>
#include <span>

#include "base/libraries/format.h"
#include "deeptide/errors.h"
#include "deeptide/pipeline.h"
#include "deeptide/pipeline_partition.h"
#include "deeptide/pipeline_stage.h"
#include "deeptide/recompute.h"
#include "engine/pipeline/layer_costs.h"

namespace deeptide {

using engine::num_trained;

namespace {

Activations run(std::span<const PipelineLayer::Forward> steps, Activations values) {
  for (const PipelineLayer::Forward& step : steps) values = step(values);
  return values;
}

/// Runs `interval` layers at a time, each time with their inputs alone kept for backward. The module outlives backward.
Activations run_recomputed(std::span<const PipelineLayer::Forward> steps, size_t interval, Activations values) {
  for (; !steps.empty(); steps = steps.subspan(std::min(interval, steps.size()))) {
    const auto now = steps.first(std::min(interval, steps.size()));
    values = recompute([now](const Activations& inputs) { return run(now, inputs); }, values);
  }
  return values;
}

void check_interval(int interval) {
  if (interval >= 0) return;
  throw ConfigError(format_text(
      "PipelineModule: activation_checkpoint_interval: got {}, expected a number of layers, or 0", interval));
}

void check(const PipelineOptions& options, size_t num_layers) {
  if (options.chunks < 1) {
    throw ConfigError(
        format_text("PipelineModule: chunks: got {}, expected 1 or more runs of layers on each stage", options.chunks));
  }
  check_interval(options.activation_checkpoint_interval);
  const std::vector<int64_t>& bounds = options.bounds;
  if (bounds.empty()) return;
  const bool covers = bounds.front() == 0 && bounds.back() == static_cast<int64_t>(num_layers);
  if (std::ssize(bounds) != int64_t{options.num_stages} * options.chunks + 1 || !covers ||
      !std::ranges::is_sorted(bounds)) {
    throw ConfigError(format_text("PipelineModule: bounds: got {} numbers, expected {} from 0 to {}, ascending",
                                  bounds.size(), options.num_stages * options.chunks + 1, num_layers));
  }
}

}  // namespace

const at::Tensor& PipelineLayer::only(const Activations& inputs) {
  TORCH_CHECK_VALUE(inputs.size() == 1, "a pipeline's layer takes one tensor, and got ", inputs.size(),
                    ": let it take deeptide::Activations");
  return inputs.front();
}

PipelineModule::PipelineModule(std::vector<PipelineLayer> layers, const PipelineOptions& options)
    : torch::nn::Module("PipelineModule"),
      options_(options),
      world_(options.world ? *options.world : init_distributed()) {
  pipeline_axes(options_.num_stages, world_.size);  // which refuses what cannot be
  if (options_.num_stages == 1) options_.chunks = 1;
  check(options_, layers.size());
  stage_ = world_.rank / (world_.size / options_.num_stages);
  choose_bounds(layers);
  const auto stages_of_key = stages_of_keys(layers);
  steps_.resize(options_.chunks);
  trains_.resize(options_.chunks);
  for (const auto& [begin, end] : runs_of(stage_)) {
    for (int64_t index = begin; index < end; ++index) add(layers, index, stages_of_key);
  }
}

void PipelineModule::choose_bounds(const Layers& layers) {
  if (options_.num_stages == 1) {  // no layer is made only to be counted
    bounds_ = {0, std::ssize(layers)};
    return;
  }
  const int parts = options_.num_stages * options_.chunks;
  if (!options_.bounds.empty()) {
    bounds_ = options_.bounds;
  } else if (options_.partition == PipelinePartition::uniform) {
    bounds_ = uniform_bounds(std::ssize(layers), parts);
  } else if (options_.partition != PipelinePartition::parameters) {
    bounds_ = engine::measured_bounds(layers, options_, world_);
  } else {
    std::vector<double> weights;
    for (const PipelineLayer& layer : layers) weights.push_back(static_cast<double>(num_trained(layer)));
    bounds_ = balanced_bounds(weights, parts);
  }
}

std::vector<std::pair<int64_t, int64_t>> PipelineModule::runs_of(int stage) const {
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (size_t part = stage; part + 1 < bounds_.size(); part += options_.num_stages) {
    runs.emplace_back(bounds_[part], bounds_[part + 1]);
  }
  return runs;
}

std::map<std::string, std::vector<int>> PipelineModule::stages_of_keys(const Layers& layers) const {
  std::map<std::string, std::vector<int>> stages;
  for (int stage = 0; stage < options_.num_stages; ++stage) {
    for (const auto& [begin, end] : runs_of(stage)) {
      for (int64_t index = begin; index < end; ++index) {
        const std::string& key = layers[index].key();
        if (key.empty() || (stages.contains(key) && stages[key].back() == stage)) continue;
        stages[key].push_back(stage);
      }
    }
  }
  return stages;
}

void PipelineModule::add(const Layers& layers, int64_t index,
                         const std::map<std::string, std::vector<int>>& stages_of_key) {
  const PipelineLayer& layer = layers[index];
  const auto chunk = static_cast<size_t>(std::ranges::upper_bound(bounds_, index) - bounds_.begin() - 1) /
                     static_cast<size_t>(options_.num_stages);
  if (options_.seed) at::manual_seed(static_cast<uint64_t>(*options_.seed + index));
  if (layer.key().empty()) {
    const PipelineLayer::Made made = layer.made();
    if (made.module) {
      register_module(std::to_string(index), made.module);
      if (num_trained(*made.module) > 0) trains_[chunk] = true;
    }
    steps_[chunk].push_back(made.forward);
    return;
  }
  const std::vector<int>& stages = stages_of_key.at(layer.key());
  if (!tied_.contains(layer.key())) {
    const PipelineLayer::Made made = layer.made();
    tied_[layer.key()] = made;
    if (stages.front() == stage_) {
      if (!named_children().contains("tied_modules")) {
        register_module("tied_modules", std::make_shared<torch::nn::Module>("TiedModules"));
      }
      named_children()["tied_modules"]->register_module(layer.key(), made.module);
    }
    const auto number = std::distance(stages_of_key.begin(), stages_of_key.find(layer.key()));
    if (stages.size() > 1) ties_.push_back({number, stages, made.module, layer.key()});
  }
  const PipelineLayer::Made& made = tied_.at(layer.key());
  if (stages.front() == stage_ && num_trained(*made.module) > 0) trains_[chunk] = true;
  steps_[chunk].push_back(layer.forward_of(made));
}

bool PipelineModule::trains(int chunk) const {
  const bool any = std::ranges::find(trains_, true) != trains_.end();
  return !any || trains_.at(static_cast<size_t>(chunk));
}

void PipelineModule::set_checkpoint_interval(int interval) {
  check_interval(interval);
  options_.activation_checkpoint_interval = interval;
}

Activations PipelineModule::forward(Activations inputs, int chunk) const {
  const auto& steps = steps_.at(static_cast<size_t>(chunk));
  const bool keeps = trains_.at(static_cast<size_t>(chunk)) || !ties_.empty() ||
                     std::ranges::any_of(inputs, [](const at::Tensor& input) { return input.requires_grad(); });
  if (!keeps || options_.activation_checkpoint_interval == 0) return run(steps, std::move(inputs));
  return run_recomputed(steps, static_cast<size_t>(options_.activation_checkpoint_interval), std::move(inputs));
}

}  // namespace deeptide
