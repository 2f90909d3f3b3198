// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The model's arithmetic: the same operators in the same order as model.py, so that both print the same losses.
#include "model.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>
#include <vector>

#include "deeptide/ops.h"

// Shapes: B windows in a batch, T bytes in a window, D width, H heads, K = D / H, V = 256 byte values.

namespace gpt {

namespace ops = deeptide::ops;

namespace {

using at::Tensor;
using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;

Tensor linear(const Linear& layer, const Tensor& x) { return ops::linear(x, layer->weight, layer->bias); }

Tensor norm(const LayerNorm& layer, const Tensor& x) {
  const auto& options = layer->options;
  return ops::layer_norm(x, options.normalized_shape(), layer->weight, layer->bias, options.eps());
}

// The norm of x + branch, and x + branch.
std::tuple<Tensor, Tensor> residual_norm(const LayerNorm& layer, const Tensor& x, const Tensor& branch) {
  const auto& options = layer->options;
  return ops::residual_layer_norm(x, branch, options.normalized_shape(), layer->weight, layer->bias, options.eps());
}

LayerNorm layer_norm(int64_t width) { return LayerNorm(LayerNormOptions({width})); }

// (B, H, T, K).
Tensor rotate(const Tensor& x, const RotaryTable& table) {
  const auto halves = x.chunk(2, -1);
  const Tensor &a = halves[0], &b = halves[1];
  return at::cat({a * table.cos - b * table.sin, b * table.cos + a * table.sin}, -1);
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

RotaryTable::RotaryTable(int64_t length, int64_t head_width, const at::TensorOptions& options) {
  const int64_t half = head_width / 2;
  const auto whole = options.dtype(at::kLong);
  const auto speeds = at::pow(10000.0, at::arange(half, whole) / -half);
  const auto angles = at::arange(length, whole).unsqueeze(1) * speeds;
  cos = angles.cos().to(options.dtype());
  sin = angles.sin().to(options.dtype());
}

AttentionImpl::AttentionImpl(const GPTConfig& config)
    : heads_(config.heads),
      qkv_(register_module("qkv", Linear(config.width, 3 * config.width))),
      proj_(register_module("proj", Linear(config.width, config.width))) {}

Tensor AttentionImpl::forward(const Tensor& x, const RotaryTable& table) {
  const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  auto parts = linear(qkv_, x).split(width, 2);
  for (Tensor& part : parts) part = part.view({batch, length, heads_, width / heads_}).transpose(1, 2);
  const Tensor q = rotate(parts[0], table), k = rotate(parts[1], table);
  const Tensor y = ops::attention(q, k, parts[2], {}, /*causal=*/true);
  return linear(proj_, y.transpose(1, 2).reshape({batch, length, width}));
}

MLPImpl::MLPImpl(const GPTConfig& config)
    : fc_(register_module("fc", Linear(config.width, 4 * config.width))),
      proj_(register_module("proj", Linear(4 * config.width, config.width))) {}

Tensor MLPImpl::forward(const Tensor& x) { return linear(proj_, ops::gelu_tanh(linear(fc_, x))); }

BlockImpl::BlockImpl(const GPTConfig& config)
    : ln_1_(register_module("ln_1", layer_norm(config.width))),
      attn_(register_module("attn", Attention(config))),
      ln_2_(register_module("ln_2", layer_norm(config.width))),
      mlp_(register_module("mlp", MLP(config))) {}

Tensor BlockImpl::forward(const Tensor& x, const RotaryTable& table) {
  const auto [y, sum] = residual_norm(ln_2_, x, attn_(norm(ln_1_, x), table));
  return sum + mlp_(y);
}

GPTImpl::GPTImpl(const GPTConfig& config, uint64_t seed)
    : config_(config),
      wte_(register_module("wte", Embedding(config.vocabulary, config.width))),
      h_(register_module("h", torch::nn::ModuleList())),
      ln_f_(register_module("ln_f", layer_norm(config.width))) {
  for (int64_t layer = 0; layer < config.layers; ++layer) h_->push_back(Block(config));
  reset_parameters(seed);
}

// The same numbers in both languages: one generator, drawn from in the order of the parameters.
void GPTImpl::reset_parameters(uint64_t seed) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config_.layers));
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    if (ends_with(name, "bias")) {
      item.value().zero_();
    } else if (name.find(".ln_") != std::string::npos || name.rfind("ln_f", 0) == 0) {
      item.value().fill_(1.0);
    } else {
      const bool residual = ends_with(name, "proj.weight");  // each block adds two of them to the stream
      item.value().normal_(0.0, residual ? residual_std : 0.02);
    }
  }
}

Tensor GPTImpl::hidden(const Tensor& tokens) {
  auto x = wte_(tokens);
  const RotaryTable table(tokens.size(1), config_.width / config_.heads, x.options());
  for (const auto& block : *h_) x = block->as<BlockImpl>()->forward(x, table);
  return norm(ln_f_, x);
}

Tensor GPTImpl::logits(const Tensor& tokens) { return ops::linear(hidden(tokens), wte_->weight); }

Tensor GPTImpl::forward(const Tensor& tokens, const Tensor& targets) {
  return ops::linear_cross_entropy(hidden(tokens).flatten(0, 1), wte_->weight, targets.flatten());
}

std::string GPTImpl::generate(std::string prompt, int64_t count, double temperature, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const auto device = wte_->weight.device();
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto context = static_cast<size_t>(config_.context);
  std::string text = std::move(prompt);
  for (int64_t i = 0; i < count; ++i) {
    const size_t length = std::min(text.size(), context);
    // Always of full length, since oneDNN keeps memory for each length it meets; what follows is not seen.
    std::vector<int64_t> padded(context, 0);
    std::transform(text.end() - static_cast<std::ptrdiff_t>(length), text.end(), padded.begin(),
                   [](char byte) { return static_cast<uint8_t>(byte); });
    const auto window = torch::tensor(padded).unsqueeze(0).to(device);
    const auto last = logits(window)[0][static_cast<int64_t>(length) - 1].to(at::kFloat).cpu();
    const auto next = at::multinomial(at::softmax(last / temperature, -1), 1, false, generator);
    text += static_cast<char>(next.item<int64_t>());
  }
  return text;
}

}  // namespace gpt
