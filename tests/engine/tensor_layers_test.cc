// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layers that ranks share, beside torch's own: outputs, gradients, losses.
#include "deeptide/tensor_layers.h"

#include <gtest/gtest.h>
#include <torch/nn/functional.h>

#include <numeric>

#include "errors.h"
#include "ranks.h"
#include "sharding/tensor_slices.h"

namespace deeptide::tensor {
namespace {

using at::Tensor;

Tensor whole_of(const TensorSlice& slice, const Tensor& local, TensorTeam& team) {
  return sharding::joined(slice, team.all_gather(local, "forward"));
}

Tensor drawn(at::IntArrayRef shape, int64_t seed) {
  const Tensor numbers = torch::arange(c10::multiply_integers(shape)) * 37 + seed * 11;
  return (numbers.remainder(101).to(at::kFloat) / 50 - 1).view(shape);
}

/// The whole layers beside those that ranks share, in forward and backward.
void compare_layers(const World& world, const std::vector<int64_t>& blocks, bool gathers) {
  const auto team = std::make_shared<TensorTeam>(world, world.size, 60.0);
  const int64_t inner = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  torch::nn::Linear up(6, inner), gate(6, inner), down(inner, 6);
  int64_t seed = 0;
  for (torch::nn::Linear* layer : {&up, &gate, &down}) {
    for (Tensor& parameter : (*layer)->parameters()) parameter.set_data(drawn(parameter.sizes(), ++seed));
  }
  ColumnParallelLinear own_up(up, team, ColumnParallelOptions{gathers, blocks}),
      own_gate(gate, team, ColumnParallelOptions{gathers, blocks});
  RowParallelLinear own_down(down, team, RowParallelOptions{gathers, blocks});
  const Tensor x = drawn({2, 3, 6}, 9).requires_grad_(), own_x = drawn({2, 3, 6}, 9).requires_grad_();
  const Tensor y = down(up(x) * gate(x).tanh()), entered = enter_team(own_x, team);
  const Tensor own_y = own_down(own_up->project(entered) * own_gate->project(entered).tanh());
  y.backward(drawn({2, 3, 6}, 10));
  own_y.backward(drawn({2, 3, 6}, 10));
  EXPECT_TRUE(at::allclose(own_y, y, 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(own_x.grad(), x.grad(), 1e-5, 1e-5));
  const auto expect_gradient = [&](const TensorSlice& slice, const Tensor& own, const Tensor& whole) {
    EXPECT_TRUE(at::allclose(whole_of(slice, own.grad(), *team), whole.grad(), 1e-5, 1e-5)) << slice.name;
  };
  expect_gradient(own_up->slices()[0], own_up->weight, up->weight);
  expect_gradient(own_up->slices()[1], own_up->bias, up->bias);
  expect_gradient(own_gate->slices()[0], own_gate->weight, gate->weight);
  expect_gradient(own_down->slices()[0], own_down->weight, down->weight);
  EXPECT_TRUE(at::allclose(own_down->bias.grad(), down->bias.grad(), 1e-5, 1e-5));
}

TEST(TensorLayers, AreTheWholeLayers) {
  for (const int ranks : {1, 2, 3}) {
    for (const std::vector<int64_t>& blocks : {std::vector<int64_t>{12}, {5, 7}, {4, 4, 4}}) {
      for (const bool gathers : {false, true}) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << blocks.size() << " blocks, " << gathers);
        run_ranks(ranks, [&](const World& world) { compare_layers(world, blocks, gathers); });
      }
    }
  }
}

TEST(TensorLayers, SendTheirSumBesideTheirWeightsGradients) {
  run_ranks(2, [](const World& world) {
    const auto team = std::make_shared<TensorTeam>(world, world.size, 60.0);
    const torch::nn::Linear whole(4, 6);
    ColumnParallelLinear one(whole, team), other(whole, team);
    std::string order;
    const auto note = [&order](const Tensor& tensor, char sign) {
      tensor.register_hook([&order, sign](const Tensor&) { order += sign; });
    };
    const Tensor x = torch::ones({2, 4}).requires_grad_(), given = x * 1, entered = enter_team(given, team);
    note(given, 'x');    // when the sum has come
    note(entered, 's');  // when it begins
    for (const ColumnParallelLinear& layer : {one, other}) {
      note(layer->weight, 'w');
      note(layer->bias, 'b');
    }
    (one->project(entered) + other->project(entered)).sum().backward();
    EXPECT_EQ(order.front(), 's');
    EXPECT_EQ(order.back(), 'x');
    EXPECT_EQ(order.size(), 6U);
    const Tensor stranger = torch::ones({2, 4}).requires_grad_();  // a sum on other ranks is not its matter
    one->project(stranger).sum().backward();
    EXPECT_TRUE(at::allclose(stranger.grad(), at::matmul(torch::ones({2, 3}), one->weight)));
  });
}

void compare_words(const World& world, int64_t words, at::Reduction::Reduction reduction) {
  const auto team = std::make_shared<TensorTeam>(world, world.size, 60.0);
  torch::nn::Embedding embed(words, 8);
  torch::nn::Linear head(8, words);
  embed->weight.set_data(drawn({words, 8}, 1));
  head->weight.set_data(drawn({words, 8}, 2));
  head->bias.set_data(drawn({words}, 3));
  VocabParallelEmbedding own_embed(embed, team);
  ColumnParallelLinear own_head(head, team);
  const Tensor tokens = (torch::arange(15).view({3, 5}) * 4).remainder(words);
  Tensor labels = tokens.roll(1, 1).clone();
  labels[0][0] = -100;
  EXPECT_TRUE(at::equal(own_embed(tokens), embed(tokens)));
  const Tensor loss = at::cross_entropy_loss(head(embed(tokens)).flatten(0, 1), labels.flatten(), {}, reduction);
  const Tensor own = vocab_parallel_cross_entropy(own_head(own_embed(tokens)), labels, team,
                                                  {.vocabulary = words, .reduction = reduction});
  EXPECT_TRUE(at::allclose(own.flatten(), loss.flatten(), 1e-5, 1e-6));
  loss.sum().backward();
  own.sum().backward();
  EXPECT_TRUE(at::allclose(whole_of(own_embed->slices()[0], own_embed->weight.grad(), *team), embed->weight.grad(),
                           1e-4, 1e-6));
  EXPECT_TRUE(
      at::allclose(whole_of(own_head->slices()[0], own_head->weight.grad(), *team), head->weight.grad(), 1e-4, 1e-6));
}

TEST(TensorLayers, HaveTheLossOfTheWholeVocabulary) {
  for (const int ranks : {1, 2, 3}) {
    for (const int64_t words : {12, 13, 19}) {
      for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << words << " words, " << reduction);
        run_ranks(ranks, [&](const World& world) { compare_words(world, words, reduction); });
      }
    }
  }
}

TEST(TensorLayers, RefuseWhatTheyCannotCut) {
  run_ranks(1, [](const World& world) {
    const auto team = std::make_shared<TensorTeam>(world, 1, 60.0);
    EXPECT_NE(error_of([&] {
                ColumnParallelLinear(torch::nn::Linear(4, 6), team, ColumnParallelOptions{false, {4, 4}});
              }).find("expected sizes that add up"),
              std::string::npos);
    const torch::nn::Embedding padded(torch::nn::EmbeddingOptions(5, 4).padding_idx(0));
    EXPECT_NE(error_of([&] { VocabParallelEmbedding(padded, team); }).find("cannot be cut"), std::string::npos);
    ColumnParallelLinear layer(torch::nn::Linear(4, 6), team);
    const Tensor x = torch::ones({2, 4}).requires_grad_();
    EXPECT_NE(error_of([&] {
                torch::autograd::grad({layer(x).square().sum()}, {x}, {}, true, /*create_graph=*/true);
              }).find("no second derivative"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace deeptide::tensor
