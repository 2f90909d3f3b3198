// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A byte-level GPT that knows nothing of ranks or shards, with Deeptide's faster operators. The twin of model.py, line
// by line.
#pragma once

#include <torch/nn.h>

#include <cstdint>
#include <string>

namespace gpt {

struct GPTConfig {
  int64_t vocabulary = 256;
  int64_t context = 256;
  int64_t width = 192;
  int64_t layers = 4;
  int64_t heads = 4;
};

/// Cosines and sines (T, K / 2) of the angles by which position turns each pair of a head's numbers.
struct RotaryTable {
  RotaryTable(int64_t length, int64_t head_width, const at::TensorOptions& options);
  at::Tensor cos, sin;
};

class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x, const RotaryTable& table);

 private:
  int64_t heads_;
  torch::nn::Linear qkv_, proj_;
};
TORCH_MODULE(Attention);

class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Linear fc_, proj_;
};
TORCH_MODULE(MLP);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x, const RotaryTable& table);

 private:
  torch::nn::LayerNorm ln_1_;
  Attention attn_;
  torch::nn::LayerNorm ln_2_;
  MLP mlp_;
};
TORCH_MODULE(Block);

class GPTImpl : public torch::nn::Module {
 public:
  explicit GPTImpl(const GPTConfig& config = {}, uint64_t seed = 0);

  /// (B, T) bytes -> (B, T, D).
  at::Tensor hidden(const at::Tensor& tokens);
  /// (B, T) bytes -> (B, T, V). The output layer is the embedding, used a second time.
  at::Tensor logits(const at::Tensor& tokens);
  /// The mean loss in nats per byte.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);
  /// `count` more bytes. Every rank must take part when the parameters are sharded; all draw the same bytes.
  std::string generate(std::string prompt, int64_t count, double temperature = 0.7, uint64_t seed = 0);

  const GPTConfig& config() const { return config_; }

 private:
  void reset_parameters(uint64_t seed);

  GPTConfig config_;
  torch::nn::Embedding wte_;
  torch::nn::ModuleList h_;
  torch::nn::LayerNorm ln_f_;
};
TORCH_MODULE(GPT);

}  // namespace gpt
