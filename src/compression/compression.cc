// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prepares a model's layers, and moves their techniques along the optimizer's steps.
#include "deeptide/compression.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/libraries/format.h"
#include "base/log.h"
#include "compression/model.h"
#include "data/private_state.h"

namespace deeptide {

using at::Tensor;
using compression::FallingBits;
using compression::Group;
using compression::Json;
using compression::Layer;
using compression::Pruning;
using compression::WeightQuantization;

namespace {

constexpr const char* kState = "less_work/compression";

void refuse_twice(bool is_there, const Layer& layer, const Group& group) {
  if (!is_there) return;
  throw ConfigError(
      format_text("init_compression: {} has {} already; call it once for a model", layer.name(), group.technique));
}

WeightQuantization weights_of(const Layer& layer, const Group& group, int64_t number) {
  const Json& params = group.params;
  const bool in_forward = params.at("quantize_weight_in_forward").get<bool>();
  const Tensor weight = layer.parameter("weight");
  auto groups = params.at("quantize_groups").get<int64_t>();
  if (in_forward && !compression::can_take(layer.module(), "sparse_pruning")) {
    groups = weight.size(0);  // an embedding's rows, each by itself, as DeepSpeed does
  }
  if (weight.numel() % groups != 0) {
    throw ConfigError(format_text(
        "{}.weight_quantization.shared_parameters.quantize_groups: {} does not divide the {} elements of {}",
        compression::kSection, groups, weight.numel(), layer.name()));
  }
  return {.bits = params.at(in_forward ? "target_bits" : "start_bits").get<int64_t>(),
          .target_bits = params.at("target_bits").get<int64_t>(),
          .period = params.at("quantization_period").get<int64_t>(),
          .groups = groups,
          .is_symmetric = params.at("quantization_type") == "symmetric",
          .is_stochastic = params.at("rounding") == "stochastic",
          .in_forward = in_forward,
          .offset = params.at("schedule_offset").get<int64_t>(),
          .number = number};
}

void add_input(Layer& layer, const Group& group) {
  auto* linear = dynamic_cast<CompressedLinearImpl*>(&layer.module());
  auto& place = linear != nullptr ? linear->input : dynamic_cast<CompressedConv2dImpl&>(layer.module()).input;
  refuse_twice(place != nullptr, layer, group);
  const Json& params = group.params;
  place = layer.input = std::make_shared<InputQuantization>();
  place->bits = params.at("bits").get<int64_t>();
  place->is_symmetric = params.at("quantization_type") == "symmetric";
  place->offset = params.at("schedule_offset").get<int64_t>();
  if (params.at("range_calibration") != "static") return;
  place->range = ActivationRange(layer.parameter("weight"));
  layer.module().register_module("activation_quantizer", place->range.ptr());
}

void add_pruning(Layer& layer, const Group& group) {
  const Json& params = group.params;
  const auto heads =
      params.contains("num_heads") && params.at("num_heads").is_number() ? params.at("num_heads").get<int64_t>() : 0;
  const Tensor weight = layer.parameter("weight");
  if (heads != 0 && weight.size(-1) % heads != 0) {
    throw ConfigError(format_text("{}.modules: {} has {} inputs, which num_heads, {}, does not divide", group.path,
                                  layer.name(), weight.size(-1), heads));
  }
  Pruning pruning{.technique = group.technique,
                  .by_scores = params.at("method") == "topk",
                  .share = params.at("dense_ratio").get<double>(),
                  .offset = params.at("schedule_offset").get<int64_t>(),
                  .heads = heads};
  refuse_twice(pruning.is_prepared(layer.module()), layer, group);
  pruning.prepare(layer.module(), weight);
  layer.pruning.push_back(std::move(pruning));
}

}  // namespace

void Compression::Impl::prepare() {
  std::map<std::pair<std::string, std::string>, std::string> taken;
  std::map<const torch::nn::Module*, size_t> places;
  int64_t number = 0;
  for (const Group& group : groups) {
    for (const std::string& pattern : group.modules) {
      const std::string who = format_text("{}: '{}'", group.name, pattern);
      for (Layer& found : compression::matching(model, group, pattern)) {
        const auto [other, is_new] = taken.emplace(std::pair(group.technique, found.name()), who);
        if (!is_new && other->second != who) {
          throw ConfigError(
              format_text("{}.modules: '{}' names {}, which {} names already; give each module to one "
                          "group",
                          group.path, pattern, found.name(), other->second));
        }
        const auto [place, is_first] = places.emplace(&found.module(), layers.size());
        if (is_first) layers.push_back(std::move(found));
        Layer& layer = layers[place->second];
        if (group.technique == compression::kWeights) {
          layer.weights = weights_of(layer, group, number);
        } else if (group.technique == compression::kInputs) {
          add_input(layer, group);
        } else {
          add_pruning(layer, group);
        }
        ++number;
      }
    }
  }
}

std::shared_ptr<Compression> init_compression(torch::nn::Module& model, const Config& config,
                                              torch::nn::Module* teacher) {
  const Json section = compression::section_of(config);
  auto impl = std::make_unique<Compression::Impl>(model);
  if (const auto part = compression::eigenvalue_section(config)) {
    impl->curvature = std::make_unique<compression::Curvature>(*part, model);
  }
  impl->groups = compression::groups_of(section);
  if (section.at("layer_reduction").at("enabled").get<bool>()) {
    compression::reduce_layers(model, teacher, section.at("layer_reduction"));
  }
  impl->prepare();
  const Json& shared = section.at(compression::kWeights).at("shared_parameters");
  if (!impl->falling_layers().empty()) {
    const Json& mixture = shared.at("fp16_mixed_quantize");
    impl->falling.emplace();
    if (mixture.at("enabled").get<bool>()) impl->falling->change = mixture.at("quantize_change_ratio").get<double>();
    impl->falling->is_verbose = shared.at("quantize_verbose").get<bool>();
    impl->falling_offset = shared.at("schedule_offset").get<int64_t>();
    if (impl->falling_offset == 0) impl->advance_bits();
  }
  impl->follow();
  return std::shared_ptr<Compression>(new Compression(std::move(impl)));
}

Compression::Compression(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Compression::~Compression() = default;

compression::Layer& Compression::Impl::layer_of(const torch::nn::Module& module, const std::string& name) {
  for (Layer& layer : layers) {
    if (&layer.module() == &module) return layer;
  }
  throw ConfigError("redundancy_clean: " + name +
                    " was not prepared; call init_compression with the same configuration first");
}

std::vector<Layer*> Compression::Impl::falling_layers() {
  std::vector<Layer*> found;
  for (Layer& layer : layers) {
    if (layer.weights && !layer.weights->in_forward) found.push_back(&layer);
  }
  return found;
}

bool Compression::Impl::is_due() {
  const auto falling_now = falling_layers();
  return std::any_of(falling_now.begin(), falling_now.end(), [&](const Layer* layer) {
    return layer->weights->bits != layer->weights->target_bits && falling->steps + 1 >= layer->weights->period;
  });
}

// DeepSpeed rounds after a step and before it looks whether the technique has begun, so weights are rounded from the
// step after schedule_offset on; with 0, from the first forward on.
void Compression::Impl::advance_bits() {
  FallingBits& bits = *falling;
  ++bits.steps;
  if (bits.change) bits.share_kept = bits.share_kept > 0 ? bits.share_kept - *bits.change : 0.0;
  int64_t index = 0;
  for (Layer* layer : falling_layers()) {
    WeightQuantization* weight = &*layer->weights;
    if (weight->bits != weight->target_bits && bits.steps >= weight->period) {
      bits.share_kept = 1.0;
      weight->period *= 2 * (curvature ? curvature->factor(layer->module()) : 1);
      --weight->bits;
      if (bits.is_verbose) {
        log(LogLevel::info, format_text("weight {} has {} bits after {} steps; period {}", index, weight->bits,
                                        bits.steps, weight->period));
      }
    }
    weight->on = true;
    weight->draws = bits.steps;
    weight->share_kept = bits.change ? bits.share_kept : 0.0;
    ++index;
  }
  if (curvature) curvature->forget();
}

void Compression::Impl::follow() {
  for (Layer& layer : layers) {
    if (layer.input) layer.input->on = steps >= layer.input->offset;
    for (Pruning& pruning : layer.pruning) pruning.on = steps >= pruning.offset;
    if (!layer.weights || !layer.weights->in_forward) continue;
    layer.weights->on = steps >= layer.weights->offset;
    layer.weights->draws = steps;
  }
}

void Compression::before_forward() {
  for (const Layer& layer : impl_->layers) layer.compress();
}

void Compression::before_backward(const Tensor& loss, const std::function<double(double)>& mean) {
  if (!impl_->curvature || !impl_->falling || impl_->steps < impl_->falling_offset || !impl_->is_due()) return;
  impl_->curvature->measure(impl_->steps, loss, mean);
}

void Compression::step() {
  if (impl_->falling && impl_->steps >= impl_->falling_offset) impl_->advance_bits();
  ++impl_->steps;
  impl_->follow();
}

void Compression::share_masks(const std::function<void(const Tensor&, int)>& broadcast) {
  for (const Layer& layer : impl_->layers) {
    for (const Pruning& pruning : layer.pruning) {
      if (!pruning.by_scores) broadcast(pruning.mask(layer.module()).view(at::kByte), 0);
    }
  }
}

std::string Compression::add_state(const std::string& client_state_json) const {
  Json state = {{"steps", impl_->steps}, {"falling", nullptr}};
  if (impl_->falling) {
    Json layers = Json::array();
    for (const Layer* layer : impl_->falling_layers()) {
      const WeightQuantization& weight = *layer->weights;
      layers.push_back(Json::array({weight.bits, weight.period, weight.share_kept}));
    }
    state["falling"] = {
        {"steps", impl_->falling->steps}, {"share_kept", impl_->falling->share_kept}, {"layers", layers}};
  }
  return data::add_private(client_state_json, kState, std::move(state));
}

bool Compression::take_state(const std::string& client_state_json) {
  return data::take_private(client_state_json, kState, [this](const Json& saved) {
    impl_->steps = saved.at("steps").get<int64_t>();
    if (impl_->falling && !saved.at("falling").is_null()) {
      const Json& state = saved.at("falling");
      FallingBits& bits = *impl_->falling;
      bits.steps = state.at("steps").get<int64_t>();
      bits.share_kept = state.at("share_kept").get<double>();
      size_t index = 0;
      for (Layer* layer : impl_->falling_layers()) {
        WeightQuantization* weight = &*layer->weights;
        const Json& one = state.at("layers").at(index++);
        weight->bits = one.at(0).get<int64_t>();
        weight->period = one.at(1).get<int64_t>();
        weight->share_kept = one.at(2).get<double>();
        weight->on = bits.steps > 0;
        weight->draws = bits.steps;
      }
    }
    impl_->follow();
  });
}

}  // namespace deeptide
