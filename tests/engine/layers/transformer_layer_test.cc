// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The layer is BERT's formula, keeps its bits where backward computes again, and trains alike where it is sharded.
#include "deeptide/transformer_layer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide::transformer_layers {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;

void expect_error(const std::string& found, const std::string& text) {
  EXPECT_NE(found.find(text), std::string::npos) << found;
}

TransformerLayerOptions small() {
  return {.hidden_size = 24, .heads = 3, .intermediate_size = 40, .num_hidden_layers = 2, .initializer_range = 0.3};
}

/// A layer whose norms and biases are not the initial ones.
TransformerLayer made(const TransformerLayerOptions& options, at::ScalarType type = at::kFloat) {
  torch::manual_seed(2);
  TransformerLayer layer(options);
  const at::NoGradGuard no_grad;
  for (const Tensor& parameter : layer->parameters()) parameter.add_(at::randn_like(parameter) * 0.1);
  layer->to(type);
  return layer;
}

Tensor by_definition(const TransformerLayerImpl& l, const Tensor& x, const Tensor& mask) {
  const auto norm = [&](const Tensor& of, const Tensor& weight, const Tensor& bias) {
    return at::layer_norm(of, {of.size(-1)}, weight, bias, l.options.layer_norm_eps);
  };
  const auto heads = [&](const Tensor& of) { return of.unflatten(-1, {l.options.heads, -1}).transpose(1, 2); };
  const bool pre = l.options.pre_layer_norm;
  const auto qkv = at::linear(pre ? norm(x, l.norm_w, l.norm_b) : x, l.attn_qkvw, l.attn_qkvb).chunk(3, -1);
  Tensor scores = at::matmul(heads(qkv[0]), heads(qkv[1]).transpose(-1, -2)) / std::sqrt(8.0);
  if (mask.defined()) scores = scores + mask;
  const Tensor context = at::matmul(scores.softmax(-1), heads(qkv[2])).transpose(1, 2).flatten(2);
  const Tensor summed = at::linear(context, l.attn_ow, l.attn_ob) + x;
  const Tensor middle = norm(summed, l.attn_nw, l.attn_nb);
  const Tensor inner = at::linear(middle, l.inter_w, l.inter_b);
  const Tensor active = at::gelu(inner, l.options.gelu == GeluForm::tanh ? "tanh" : "none");
  const Tensor output = at::linear(active, l.output_w, l.output_b);
  return pre ? output + summed : norm(output + middle, l.norm_w, l.norm_b);
}

TEST(TransformerLayer, IsItsDefinition) {
  for (const bool pre : {true, false}) {
    for (const GeluForm gelu : {GeluForm::tanh, GeluForm::exact}) {
      for (const bool masked : {true, false}) {
        TransformerLayerOptions options = small();
        options.pre_layer_norm = pre;
        options.gelu = gelu;
        TransformerLayer layer = made(options, at::kDouble);
        const Tensor x = at::randn({2, 5, 24}, at::kDouble);
        const Tensor mask = masked ? at::zeros({2, 1, 1, 5}).slice(3, 3) - 10000.0 : Tensor();
        const Tensor whole = masked ? at::cat({at::zeros({2, 1, 1, 3}), mask}, 3) : Tensor();
        // fp64 with sums of at most 40 numbers.
        EXPECT_TRUE(at::allclose(layer(x, whole), by_definition(*layer, x, whole), 1e-11, 1e-12)) << pre << masked;
      }
    }
  }
}

/// The output, the gradients and the number that is drawn next.
std::vector<Tensor> results_of(const TransformerLayerOptions& options, at::ScalarType type) {
  TransformerLayer layer = made(options, type);
  const Tensor x = at::randn({2, 6, 24}, type).requires_grad_();
  torch::manual_seed(9);
  const Tensor y = layer(x);
  (y * at::linspace(-1, 1, y.numel(), y.options()).view(y.sizes())).sum().backward();
  std::vector<Tensor> results = {y.detach(), x.grad()};
  for (const Tensor& parameter : layer->parameters()) results.push_back(parameter.grad());
  results.push_back(at::rand({2}));
  return results;
}

TEST(TransformerLayer, KeepsItsBitsWhereBackwardComputesAgain) {
  for (const bool pre : {true, false}) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      TransformerLayerOptions options = small();
      options.pre_layer_norm = pre;
      options.attn_dropout_ratio = 0.3;
      options.hidden_dropout_ratio = 0.2;
      const auto kept = results_of(options, type);
      options.gelu_checkpoint = options.attn_dropout_checkpoint = true;
      const auto again = results_of(options, type);
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(again[i].equal(kept[i])) << i;
      if (type != at::kFloat) continue;
      options.normalize_invertible = true;  // its backward starts from the norm's rounded output
      const auto near = results_of(options, type);
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::allclose(near[i], kept[i], 1e-3, 1e-4)) << i;
    }
  }
}

TEST(TransformerLayer, DropsNothingInEvaluation) {
  TransformerLayerOptions options = small();
  options.attn_dropout_ratio = options.hidden_dropout_ratio = 0.5;
  TransformerLayer layer = made(options);
  const Tensor x = at::randn({2, 6, 24});
  EXPECT_FALSE(layer(x).equal(layer(x)));
  layer->eval();
  EXPECT_TRUE(layer(x).equal(layer(x)));
}

TEST(TransformerLayer, RefusesASecondDerivativeThatItWouldLose) {
  for (bool TransformerLayerOptions::*option :
       {&TransformerLayerOptions::gelu_checkpoint, &TransformerLayerOptions::normalize_invertible}) {
    TransformerLayerOptions options = small();
    options.*option = true;
    TransformerLayer layer = made(options, at::kDouble);
    const Tensor x = at::randn({1, 3, 24}, at::kDouble).requires_grad_();
    const Tensor loss = layer(x).pow(2).sum();
    expect_error(error_of([&] { torch::autograd::grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true); }),
                 "no second derivative: leave out create_graph");
  }
}

TEST(TransformerLayer, BeginsAsConfigured) {
  TransformerLayer layer(TransformerLayerOptions{.hidden_size = 128, .heads = 4, .num_hidden_layers = 3});
  EXPECT_EQ(layer->inter_w.sizes(), at::IntArrayRef({512, 128}));
  EXPECT_NEAR(layer->attn_qkvw.std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(layer->output_w.std().item<double>(), 0.02 / std::sqrt(6.0), 0.0005);
  EXPECT_TRUE(layer->norm_w.eq(1).all().item<bool>() && layer->attn_qkvb.eq(0).all().item<bool>());
  const auto copy = std::dynamic_pointer_cast<TransformerLayerImpl>(layer->clone());
  EXPECT_TRUE(copy->attn_qkvw.equal(layer->attn_qkvw));
}

TEST(TransformerLayer, NamesWhatItRefuses) {
  const auto refuses = [](TransformerLayerOptions options, const char* text) {
    expect_error(error_of([&] { TransformerLayer layer(options); }), text);
  };
  refuses({}, "hidden_size: got 0, expected 1 or more");
  refuses({.hidden_size = 48, .heads = 5}, "heads: 5 does not divide hidden_size, 48");
  refuses({.hidden_size = 48, .heads = 4, .attn_dropout_ratio = 1.0},
          "attn_dropout_ratio: got 1, expected 0 to below 1");
  refuses({.hidden_size = 48, .heads = 4, .num_hidden_layers = 0}, "num_hidden_layers 0: expected");
}

/// Two layers that compute again what they can.
struct EncoderImpl : torch::nn::Module {
  EncoderImpl() : embed(kVocabulary, 24) {
    register_module("embed", embed);
    TransformerLayerOptions options = small();
    options.gelu_checkpoint = options.attn_dropout_checkpoint = options.normalize_invertible = true;
    for (int i = 0; i < 2; ++i) layers->push_back(TransformerLayer(options));
    register_module("layer", layers);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embed(tokens);
    for (const auto& layer : *layers) x = layer->as<TransformerLayer>()->forward(x);
    return F::cross_entropy(at::linear(x, embed->weight).flatten(0, 1).to(at::kFloat), tokens.flatten());
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Encoder);

TEST(TransformerLayer, TrainsAlikeWhereItIsSharded) {
  std::vector<Tensor> weights[2];
  std::vector<double> losses[2];
  for (const int sharded : {0, 1}) {
    run_ranks(2, [&](const World& world) {
      Encoder model = make_seeded([] { return Encoder(); });
      Engine engine = engine_of(*model, world, config_of(sharded ? 3 : 0, 2, 1, false, Ranks::apart));
      for (int step = 0; step < 3; ++step) {
        const Tensor loss = model((at::arange(12).view({2, 6}) * 7 + step + world.rank).remainder(kVocabulary));
        if (world.rank == 0) losses[sharded].push_back(loss.item<double>());
        engine.backward(loss);
        engine.step();
      }
      for (const auto& item : engine.module_state_dict(0)) weights[sharded].push_back(item.tensor);
    });
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_LT(losses[0].back(), losses[0].front());
  ASSERT_EQ(weights[0].size(), 25);
  ASSERT_EQ(weights[1].size(), 25);
  for (size_t i = 0; i < weights[0].size(); ++i) EXPECT_TRUE(weights[0][i].equal(weights[1][i])) << i;
}

}  // namespace
}  // namespace deeptide::transformer_layers
