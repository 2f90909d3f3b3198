// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A small model, its batches and its configuration.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <string>

#include "deeptide/engine.h"

namespace deeptide {

inline constexpr int64_t kVocabulary = 37;
inline constexpr int64_t kWidth = 20;  // odd sizes, so that shards need padding

struct BlockImpl : torch::nn::Module {
  BlockImpl() : norm(torch::nn::LayerNormOptions({kWidth})), up(kWidth, 3 * kWidth), down(3 * kWidth, kWidth) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// A head whose weight is another module's.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TinyModelImpl : torch::nn::Module {
  explicit TinyModelImpl(int layers = 3)
      : embed(kVocabulary, kWidth), norm(torch::nn::LayerNormOptions({kWidth})), head(embed->weight) {
    register_module("embed", embed);
    for (int i = 0; i < layers; ++i) blocks->push_back(Block());
    register_module("h", blocks);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor logits(at::Tensor x) {
    x = embed(x);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    return torch::nn::functional::cross_entropy(logits(tokens).to(torch::kFloat), targets);
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  TiedHead head;
};
TORCH_MODULE(TinyModel);

inline std::mutex seed_mutex;  // ranks as threads share torch's generator, whatever they make

/// The same weights every time, also when ranks as threads, which share one generator, build at once.
template <typename Make>
auto make_seeded(Make make) {
  std::lock_guard lock(seed_mutex);
  torch::manual_seed(0);
  return make();
}

inline TinyModel make_tiny() {
  return make_seeded([] { return TinyModel(); });
}

/// Tokens and targets of one global batch, (batch,) each.
inline std::pair<at::Tensor, at::Tensor> batch_of(int64_t step, int64_t batch) {
  const at::Tensor at = torch::arange(batch) * 7 + step * 13;
  return {at.remainder(kVocabulary), (at * at + 3).remainder(kVocabulary)};
}

/// How ranks that are threads of one process see each other: on one host, or each on a host of its own. At stage 3
/// only the latter shard their parameters.
enum class Ranks : uint8_t { together, apart };

inline Config config_of(int stage, int64_t micro = 2, int64_t gas = 1, bool bf16 = false,
                        Ranks ranks = Ranks::together) {
  return Config::from_text(R"({"train_micro_batch_size_per_gpu": )" + std::to_string(micro) +
                           R"(, "gradient_accumulation_steps": )" + std::to_string(gas) +
                           R"(, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5,
                               "weight_decay": 0.1}},
                             "gradient_clipping": 1.0, "zero_optimization": {"stage": )" +
                           std::to_string(stage) +
                           R"(, "stage3_param_persistence_threshold": 0}, "bf16": {"enabled": )" +
                           (bf16 ? "true" : "false") + R"(}, "deeptide": {"comm_timeout": 60, "shared_memory": )" +
                           (ranks == Ranks::together ? "true" : "false") + "}}");
}

/// Ranks that share no memory, as on hosts of their own: at stage 3 only these shard their parameters.
inline Config apart(const Config& config) { return config.with(R"({"deeptide": {"shared_memory": false}})"); }

inline Engine engine_of(torch::nn::Module& model, const World& world, const Config& config) {
  InitOptions options;
  options.world = world;
  return initialize(model, config, options);
}

}  // namespace deeptide
