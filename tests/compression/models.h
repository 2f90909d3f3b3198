// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layers of the values for which DeepSpeed 0.19.6 gave its results, and configurations of one technique.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <string>
#include <vector>

#include "base/libraries/nlohmann.h"
#include "deeptide/compression.h"

namespace deeptide::compressed {

using Json = nlohmann::ordered_json;
using at::Tensor;

/// The file that Python's tests compare with, too.
inline const Json& theirs() {
  static const Json all = [] {
    std::ifstream file(DEEPTIDE_DEEPSPEEDS_RESULTS);
    return read_json<Json>(std::string(std::istreambuf_iterator<char>(file), {}));
  }();
  return all;
}

/// Multiples of 1 / 64, whose sums are exact in any order.
inline Tensor grid(at::IntArrayRef shape, uint64_t seed) {
  return torch::randint(-97, 98, shape, at::make_generator<at::CPUGeneratorImpl>(seed)) / 64;
}

inline Tensor tensor_of(const Json& values, at::IntArrayRef shape) {
  return torch::tensor(values.get<std::vector<double>>()).to(at::kFloat).view(shape);
}

inline std::vector<float> floats_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().to(at::kFloat).contiguous().flatten();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

/// A configuration with one technique and one group, "a".
inline Json section(const std::string& technique, const Json& params, const Json& shared = Json::object(),
                    const Json& related = nullptr, const Json& modules = Json::array({"0"})) {
  Json part;
  part["shared_parameters"] = shared;
  part["shared_parameters"]["enabled"] = true;
  part["different_groups"]["a"] = {{"params", params}, {"modules", modules}};
  if (!related.is_null()) part["different_groups"]["a"]["related_modules"] = related;
  Json all;
  all["compression_training"][technique] = part;
  return all;
}

inline Json bits(int start, int target, const Json& shared = Json::object(), int period = 1) {
  return section("weight_quantization",
                 {{"start_bits", start}, {"target_bits", target}, {"quantization_period", period}}, shared);
}

inline Config config_of(Json section) {
  section["train_micro_batch_size_per_gpu"] = 2;
  return Config::from_text(write_json(section));
}

template <typename Layer>
Layer with_values(Layer layer, const Tensor& weight, const Tensor& bias = {}) {
  const at::NoGradGuard no_grad;
  layer->weight.copy_(weight);
  if constexpr (requires { layer->bias; }) {
    if (bias.defined()) layer->bias.copy_(bias);
  }
  return layer;
}

inline CompressedLinear linear() { return with_values(CompressedLinear(6, 4), grid({4, 6}, 1), grid({4}, 2)); }
inline CompressedConv2d conv() {
  return with_values(CompressedConv2d(torch::nn::Conv2dOptions(3, 4, 2)), grid({4, 3, 2, 2}, 3), grid({4}, 2));
}
inline torch::nn::Sequential two_linears() {
  return torch::nn::Sequential(linear(), with_values(torch::nn::Linear(4, 6), grid({6, 4}, 14), grid({6}, 15)));
}
inline torch::nn::Sequential convolutions() {
  return torch::nn::Sequential(
      conv(), with_values(torch::nn::BatchNorm2d(4), grid({4}, 12), grid({4}, 13)),
      with_values(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 2, 2)), grid({2, 4, 2, 2}, 11), torch::zeros({2})));
}

}  // namespace deeptide::compressed
