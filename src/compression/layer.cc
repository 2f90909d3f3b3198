// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Kinds of layers, their members and shapes.
#include "compression/layer.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <set>
#include <utility>

#include "base/libraries/format.h"
#include "base/libraries/pattern.h"
#include "deeptide/quantize.h"

namespace deeptide::compression {
struct Registered;
}
/// torch's modules let no one take a parameter or a buffer away, and have Cloneable for a friend.
template <>
class torch::nn::Cloneable<deeptide::compression::Registered> {
 public:
  static void erase_parameter(torch::nn::Module& module, const std::string& name) { module.parameters_.erase(name); }
  static void erase_buffer(torch::nn::Module& module, const std::string& name) { module.buffers_.erase(name); }
};

namespace deeptide {

using at::Tensor;

Tensor CompressedLinearImpl::forward(const Tensor& x) {
  return LinearImpl::forward(input && input->on ? input->values(x, /*is_image=*/false) : x);
}

Tensor CompressedConv2dImpl::forward(const Tensor& x) {
  return Conv2dImpl::forward(input && input->on ? input->values(x, /*is_image=*/true) : x);
}

namespace compression {
namespace {

using torch::nn::BatchNorm2dImpl;
using torch::nn::Conv2dImpl;
using torch::nn::EmbeddingImpl;
using torch::nn::LinearImpl;

template <typename Kind>
Kind* as(torch::nn::Module& module) {
  return dynamic_cast<Kind*>(&module);
}

template <typename Kind>
bool is(const torch::nn::Module& module) {
  return dynamic_cast<const Kind*>(&module) != nullptr;
}

Pattern pattern_of(const Group& group, const std::string& pattern, const char* key) {
  try {
    return Pattern(pattern == "*" ? ".*" : pattern);
  } catch (const PatternError& error) {
    throw ConfigError(format_text("{}.{}: '{}' is no regular expression ({}); give a part of a module's name",
                                  group.path, key, pattern, error.what()));
  }
}

}  // namespace

Layer::Layer(std::string name, std::shared_ptr<torch::nn::Module> module)
    : name_(std::move(name)), module_(std::move(module)) {
  if (auto* linear = as<LinearImpl>(*module_)) weight_ = &linear->weight, bias_ = &linear->bias;
  if (auto* conv = as<Conv2dImpl>(*module_)) weight_ = &conv->weight, bias_ = &conv->bias;
  if (auto* embedding = as<EmbeddingImpl>(*module_)) weight_ = &embedding->weight;
}

Tensor Layer::parameter(const char* key) const {
  const auto parameters = module_->named_parameters(/*recurse=*/false);
  const Tensor* found = parameters.find(key);
  return found == nullptr ? Tensor() : *found;
}

void Layer::compress() const {
  Tensor weight = parameter("weight"), bias = parameter("bias");
  if (weights && weights->on) weight = ops::straight_through(weight, weights->values(weight));
  for (const Pruning& one : pruning) {
    if (one.on) one.apply(*module_, weight, bias);
  }
  *weight_ = weight;
  if (bias_ != nullptr) *bias_ = bias;
}

void Layer::restore() const {
  *weight_ = parameter("weight");
  if (bias_ != nullptr) *bias_ = parameter("bias");
}

void Layer::set(const char* key, const Tensor& values) const { parameter(key).set_data(values.detach().contiguous()); }

void Layer::keep_outputs(const Tensor& mask) const {
  auto* conv = as<Conv2dImpl>(*module_);
  if (conv != nullptr && conv->options.groups() != 1) {
    throw ConfigError("redundancy_clean: " + name_ + " is a grouped convolution, whose channels could not be removed");
  }
  const Tensor kept = mask.nonzero().view(-1);
  for (const char* key : {"weight", "bias"}) {
    if (const Tensor whole = parameter(key); whole.defined()) set(key, whole.index_select(0, kept));
  }
  if (conv != nullptr) conv->options.out_channels(kept.numel());
  if (auto* linear = as<LinearImpl>(*module_)) linear->options.out_features(kept.numel());
}

void Layer::keep_inputs(const Tensor& mask) const {
  if (is<BatchNorm2dImpl>(*module_)) return keep_features(mask);
  const Tensor kept = mask.nonzero().view(-1);
  set("weight", parameter("weight").index_select(1, kept));
  if (auto* conv = as<Conv2dImpl>(*module_)) conv->options.in_channels(kept.numel());
  if (auto* linear = as<LinearImpl>(*module_)) linear->options.in_features(kept.numel());
}

void Layer::keep_features(const Tensor& mask) const {
  auto* norm = as<BatchNorm2dImpl>(*module_);
  const Tensor kept = mask.nonzero().view(-1);
  for (const Tensor& whole : {norm->weight, norm->bias, norm->running_mean, norm->running_var}) {
    if (whole.defined()) whole.set_data(whole.detach().index_select(0, kept));
  }
  norm->options.num_features(kept.numel());
}

bool can_take(const torch::nn::Module& module, const std::string& technique) {
  if (technique == kInputs) return is<CompressedLinearImpl>(module) || is<CompressedConv2dImpl>(module);
  if (technique == kWeights && is<EmbeddingImpl>(module)) return true;
  if (technique == kWeights || technique == "sparse_pruning") return is<LinearImpl>(module) || is<Conv2dImpl>(module);
  return technique == "channel_pruning" ? is<Conv2dImpl>(module) : is<LinearImpl>(module);
}

std::vector<Layer> matching(torch::nn::Module& model, const Group& group, const std::string& pattern, bool is_related) {
  const char* const key = is_related ? "related_modules" : "modules";
  const Pattern search = pattern_of(group, pattern, key);
  std::vector<Layer> found;
  std::set<const torch::nn::Module*> seen;  // a module may have several names
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module& module = *item.value();
    const bool fits = is_related ? is<LinearImpl>(module) || is<Conv2dImpl>(module) || is<BatchNorm2dImpl>(module)
                                 : can_take(module, group.technique);
    if (fits && search.is_in(item.key()) && seen.insert(&module).second) {
      found.emplace_back(item.key(), item.value());
    }
  }
  if (!found.empty()) return found;
  throw ConfigError(
      format_text("{}.{}: no module that {} can change has '{}' in its name; named_modules() lists the "
                  "names, and activation_quantization takes deeptide's CompressedLinear and "
                  "CompressedConv2d alone",
                  group.path, key, group.technique, pattern));
}

void erase_buffer(torch::nn::Module& module, const std::string& name) {
  torch::nn::Cloneable<Registered>::erase_buffer(module, name);
}

void erase_parameter(torch::nn::Module& module, const std::string& name) {
  torch::nn::Cloneable<Registered>::erase_parameter(module, name);
}

}  // namespace compression
}  // namespace deeptide
