// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// C++ models as people write them, sharded at stage 3: the same loss and gradients, bit for bit, as without an engine.
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
namespace nn = torch::nn;

/// A module and its loss: every call of `loss` computes the same.
struct Subject {
  std::shared_ptr<nn::Module> module;
  std::function<Tensor()> loss;
};

Tensor ramp(at::IntArrayRef sizes, double low = -1.0, double high = 1.0) {
  return torch::linspace(low, high, c10::multiply_integers(sizes)).view(sizes);
}

std::vector<Tensor> trainable(const nn::Module& module) {
  std::vector<Tensor> parameters;
  for (const auto& item : module.named_parameters()) {
    const bool known =
        std::any_of(parameters.begin(), parameters.end(), [&](const Tensor& t) { return t.is_same(item.value()); });
    if (item.value().requires_grad() && !known) parameters.push_back(item.value());
  }
  return parameters;
}

/// Results as copies that no engine owns.
std::vector<Tensor> results_of(const Subject& subject) {
  const Tensor loss = subject.loss();
  std::vector<Tensor> results{loss.detach().clone()};
  for (const Tensor& g :
       torch::autograd::grad({loss}, trainable(*subject.module), {}, {}, false, /*allow_unused=*/true)) {
    results.push_back(g.defined() ? g.clone() : Tensor());
  }
  return results;
}

void expect_same_bits(const std::vector<Tensor>& one, const std::vector<Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].defined(), other[i].defined()) << (i ? "gradient " : "loss ") << i;
    if (one[i].defined()) {
      EXPECT_TRUE(torch::equal(one[i], other[i])) << (i ? "gradient " : "loss ") << i;
    }
  }
}

// --- The models

Subject lstm() {
  auto module = nn::LSTM(nn::LSTMOptions(6, 10).num_layers(2).bidirectional(true));
  return {module.ptr(), [module]() mutable { return std::get<0>(module(ramp({5, 3, 6}))).square().mean(); }};
}

Subject gru() {
  auto module = nn::GRU(nn::GRUOptions(4, 8));
  return {module.ptr(), [module]() mutable { return std::get<0>(module(ramp({4, 2, 4}))).square().mean(); }};
}

Subject convolutions() {
  auto module =
      nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 4, 2)), nn::Flatten(), nn::Linear(4 * 49, 5));
  return {module.ptr(), [module]() mutable {
            module->apply([](nn::Module& m) {  // each call starts from the same running statistics
              if (auto* norm = m.as<nn::BatchNorm2d>()) norm->reset_running_stats();
            });
            return module->forward(ramp({2, 3, 6, 6})).square().mean();
          }};
}

Subject attention() {
  auto module = nn::MultiheadAttention(nn::MultiheadAttentionOptions(12, 3));
  return {module.ptr(), [module]() mutable {
            const Tensor x = ramp({5, 2, 12});
            return std::get<0>(module(x, x * 2, x + 1)).square().mean();
          }};
}

Subject transformer_layer() {
  auto module = nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(24).dropout(0.0));
  return {module.ptr(), [module]() mutable { return module(ramp({6, 2, 16})).square().mean(); }};
}

/// Saves its weight for backward explicitly.
struct Scale : torch::autograd::Function<Scale> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

Subject custom_function() {
  auto module = nn::Linear(7, 7);
  return {module.ptr(), [module]() mutable {
            return Scale::apply(module(ramp({3, 7})), module->bias).square().mean();
          }};
}

/// Reentrant activation checkpointing: forward runs without a graph, and again with one in backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(AutogradContext* context, const Tensor& x, nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.get());
    torch::NoGradGuard no_grad;
    return torch::tanh(layer(x));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto* layer = reinterpret_cast<nn::LinearImpl*>(context->saved_data["layer"].toInt());
    torch::AutoGradMode with_graph(true);
    const Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    const auto inner = torch::autograd::grad({torch::tanh(layer->forward(x))}, {x}, {gradients[0]});
    return {inner[0], Tensor()};
  }
};

Subject checkpointed() {
  auto first = nn::Linear(6, 6), second = nn::Linear(6, 6);
  auto module = std::make_shared<nn::Module>();
  module->register_module("first", first);
  module->register_module("second", second);
  return {module, [first, second]() mutable { return Recompute::apply(first(ramp({4, 6})), second).square().mean(); }};
}

/// Tied, sliced, transposed, used outside its module and through a list.
Subject free_style() {
  auto embed = nn::Embedding(11, 6);
  auto linear = nn::Linear(6, 6);
  auto module = std::make_shared<nn::Module>();
  module->register_module("embed", embed);
  module->register_module("linear", linear);
  return {module, [embed, linear]() mutable {
            const Tensor x = linear(embed(torch::arange(5)));
            const Tensor rows = torch::cat({embed->weight.narrow(0, 2, 3), linear->weight.t()});
            const Tensor logits = torch::matmul(x, embed->weight.t());
            return logits.square().mean() + rows.square().sum() + torch::stack({linear->bias, linear->bias * 2}).sum();
          }};
}

/// A gradient penalty: backward through backward.
Subject double_backward() {
  auto module = nn::Sequential(nn::Linear(5, 8), nn::Tanh(), nn::Linear(8, 1));
  return {module.ptr(), [module]() mutable {
            const Tensor x = ramp({3, 5}).set_requires_grad(true);
            const Tensor y = module->forward(x).sum();
            const auto slopes = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
            return y + slopes[0].square().sum();
          }};
}

/// No element, one element, fewer than ranks, frozen, of another type.
Subject odd_sizes() {
  auto module = std::make_shared<nn::Module>();
  const Tensor none = module->register_parameter("none", torch::zeros({0, 3}));
  const Tensor one = module->register_parameter("one", torch::full({}, 3.0f));
  const Tensor few = module->register_parameter("few", ramp({2}));
  const Tensor frozen = module->register_parameter("frozen", ramp({40}).to(torch::kDouble), /*requires_grad=*/false);
  const Tensor half = module->register_parameter("half", ramp({30}).to(torch::kBFloat16));
  return {module, [=] {
            return (one * few).sum() + none.sum() + frozen.sum().to(torch::kFloat) +
                   half.to(torch::kFloat).square().sum();
          }};
}

struct Case {
  const char* name;
  Subject (*make)();
};

class GateModels : public testing::TestWithParam<Case> {};

TEST_P(GateModels, GiveTheSameBitsShardedAsWhole) {
  for (const int size : {2, 3}) {
    run_ranks(size, [&](const World& world) {
      const Subject subject = make_seeded(GetParam().make);
      const auto expected = results_of(subject);
      Engine engine = engine_of(*subject.module, world, apart(config_of(3)));
      for (int pass = 0; pass < 2; ++pass) expect_same_bits(results_of(subject), expected);
      EXPECT_GT(engine.peak_gathered_bytes(), 0) << "nothing was sharded";
      engine.backward(subject.loss());
      EXPECT_TRUE(engine.step().applied());
      const Tensor after = subject.loss().detach();
      EXPECT_FALSE(torch::equal(after, expected[0])) << "a step changes the loss";
      engine.empty_partition_cache();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GateModels,
                         testing::Values(Case{"Lstm", lstm}, Case{"Gru", gru}, Case{"Convolutions", convolutions},
                                         Case{"Attention", attention}, Case{"TransformerLayer", transformer_layer},
                                         Case{"CustomFunction", custom_function}, Case{"Checkpointed", checkpointed},
                                         Case{"FreeStyle", free_style}, Case{"DoubleBackward", double_backward},
                                         Case{"OddSizes", odd_sizes}),
                         [](const auto& info) { return info.param.name; });

TEST(GateUse, InitialisesInPlace) {
  run_ranks(2, [](const World& world) {
    auto linear = make_seeded([] { return nn::Linear(6, 6); });
    Engine engine = engine_of(*linear, world, apart(config_of(3)));
    nn::init::constant_(linear->weight, 0.5);
    nn::init::eye_(linear->weight);
    nn::init::zeros_(linear->bias);
    engine.empty_partition_cache();
    EXPECT_TRUE(torch::equal(linear(ramp({2, 6})).detach(), ramp({2, 6})));
    engine.empty_partition_cache();
  });
}

TEST(GateUse, KeepsViewsThatWereTakenBeforeAStep) {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, apart(config_of(3)));
    const Tensor view = model->embed->weight.detach().t().narrow(0, 3, 2);
    const Tensor before = view.clone();
    const auto [tokens, targets] = batch_of(0, 4);
    engine.backward(model(tokens, targets));
    ASSERT_TRUE(engine.step().applied());
    EXPECT_TRUE(torch::equal(view.clone(), model->embed->weight.detach().clone().t().narrow(0, 3, 2)));
    EXPECT_FALSE(torch::equal(view.clone(), before));
    engine.empty_partition_cache();
  });
}

TEST(GateUse, ServesSeveralThreadsOfEachRank) {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    const auto [tokens, targets] = batch_of(0, 4);
    const Tensor expected = model(tokens, targets).detach();
    Engine engine = engine_of(*model, world, apart(config_of(3)));
    std::vector<Tensor> losses(3);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < losses.size(); ++t) {
      threads.emplace_back([&, t, tokens = tokens, targets = targets] {
        at::set_num_threads(1);
        torch::NoGradGuard no_grad;
        losses[t] = model(tokens, targets);
      });
    }
    for (auto& thread : threads) thread.join();
    for (const Tensor& loss : losses) EXPECT_TRUE(torch::equal(loss, expected));
    engine.empty_partition_cache();
  });
}

TEST(GateUse, CopiesAModuleAndSavesTheCopy) {
  run_ranks(2, [](const World& world) {
    auto linear = make_seeded([] { return nn::Linear(6, 6); });
    const Tensor expected = linear->weight.detach().clone();
    Engine engine = engine_of(*linear, world, apart(config_of(3)));
    const auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(linear->clone());
    std::stringstream stream;
    torch::save(copy->weight, stream);
    Tensor loaded;
    torch::load(loaded, stream);
    EXPECT_TRUE(torch::equal(loaded, expected)) << "a copy is an ordinary tensor";
    engine.empty_partition_cache();
  });
}

TEST(GateUse, SavesALiveParameterOrSaysWhatToDo) {
  run_ranks(2, [](const World& world) {
    auto linear = make_seeded([] { return nn::Linear(6, 6); });
    const Tensor expected = linear->weight.detach().clone();
    Engine engine = engine_of(*linear, world, apart(config_of(3)));
    std::stringstream stream;
    try {
      torch::save(linear->weight, stream);
      Tensor loaded;
      torch::load(loaded, stream);
      EXPECT_TRUE(torch::equal(loaded, expected)) << "what is saved without an error must be right";
    } catch (const std::exception& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("parameter 'weight' was accessed directly while it is sharded"), std::string::npos) << text;
    }
    engine.empty_partition_cache();
  });
}

}  // namespace
}  // namespace deeptide
