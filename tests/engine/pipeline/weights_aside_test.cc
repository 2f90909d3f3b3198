// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gradients of weights that come after those of activations: torch's bits, which ones, what is kept, and when they
// come.
#include "engine/pipeline/weights_aside.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <map>

#include "deeptide/autocast.h"
#include "deeptide/pipeline_schedule.h"
#include "deeptide/recompute.h"
#include "engine/models.h"
#include "ranks.h"

namespace deeptide::parted {
namespace {

using at::Tensor;
using engine::WeightsAside;
using Tensors = std::vector<Tensor>;

/// One of each kind of product, and parameters whose gradients come at once.
struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    for (const auto& [name, module] : {std::pair<const char*, torch::nn::Linear*>{"flat", &flat}, {"twice", &twice}}) {
      register_module(name, *module);
    }
    register_module("convolution", convolution);
    register_module("norm", norm);
    register_module("partly", partly);
    partly->bias.set_requires_grad(false);
    bare = register_parameter("bare", torch::randn({8, 8}));
    experts = register_parameter("experts", torch::randn({3, 8, 8}) * 0.1);
    mixed = register_parameter("mixed", torch::randn({8, 8}));
    hooked = register_parameter("hooked", torch::randn({8, 8}));
  }

  Tensor forward(Tensor x) {  // (3, 4, 8)
    x = norm(torch::tanh(flat(x)));
    x = twice(torch::gelu(twice(x))) + partly(x);
    x = torch::bmm(torch::tanh(x), experts) + x.matmul(bare.t());
    x = convolution(torch::tanh(x).transpose(1, 2)).transpose(1, 2);
    x = torch::tanh(x.reshape({12, 8}).mm(mixed)) + mixed.square().sum();
    const Tensor seen = x.mm(hooked);
    if (seen.requires_grad()) seen.register_hook([](const Tensor& gradient) { return gradient * 2; });
    return seen;
  }

  torch::nn::Linear flat{8, 8}, twice{8, 8}, partly{8, 8};
  torch::nn::Conv1d convolution{torch::nn::Conv1dOptions(8, 8, 1)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  Tensor bare, experts, mixed, hooked;
};
TORCH_MODULE(Kinds);

struct Found {
  std::map<std::string, Tensor> at_once, all;  // gradients by name
  Tensor of_input;
};

/// Runs forward and backward; the gradients of weights apart if `aside` is given.
Found train(Kinds& model, const std::shared_ptr<WeightsAside>& aside, bool autocast = false, bool again = false) {
  model->zero_grad();
  torch::manual_seed(3);
  const Tensor x = torch::randn({3, 4, 8}).set_requires_grad(true);
  Tensor loss;
  {
    const WeightsAside::Recording recording(aside);
    std::optional<Autocast> scope;
    if (autocast) scope.emplace(at::kCPU, at::kBFloat16);
    const Tensor output =
        again ? recompute([&](const Tensors& in) { return Tensors{model(in.at(0))}; }, {x}).at(0) : model(x);
    loss = (output.to(at::kFloat) * torch::linspace(-1, 1, output.numel()).view(output.sizes())).sum();
  }
  const auto gradients = [&] {
    std::map<std::string, Tensor> found;
    for (const auto& item : model->named_parameters()) {
      if (item->grad().defined()) found[item.key()] = item->grad().clone();
    }
    return found;
  };
  if (aside) aside->part({loss});
  loss.backward();
  Found found{gradients(), {}, x.grad()};
  if (aside) {
    const auto [from, with] = aside->take();
    torch::autograd::backward(from, with);
    EXPECT_TRUE(aside->take().first.empty());
  }
  found.all = gradients();
  return found;
}

std::shared_ptr<WeightsAside> aside_of(Kinds& model) {
  auto aside = std::make_shared<WeightsAside>();
  aside->set_weights(model->parameters());
  return aside;
}

TEST(WeightsAside, ComeWithTheBitsOfOneBackward) {
  torch::manual_seed(1);
  Kinds model;
  for (const bool autocast : {false, true}) {
    for (const bool again : {false, true}) {
      SCOPED_TRACE(std::string(autocast ? "autocast" : "") + (again ? " recomputed" : ""));
      const Found whole = train(model, nullptr, autocast, again),
                  parts = train(model, aside_of(model), autocast, again);
      EXPECT_TRUE(parts.of_input.equal(whole.of_input));
      ASSERT_EQ(parts.all.size(), whole.all.size());
      for (const auto& [name, gradient] : whole.all) {
        // Its two parts come one by one, and are added in another order.
        const double tolerance = name == "mixed" ? 1e-4 : 0.0;
        EXPECT_LE((parts.all.at(name) - gradient).abs().max().item<double>(), tolerance) << name;
      }
    }
  }
}

TEST(WeightsAside, AreThoseOfProductsThatNobodyLooksAt) {
  Kinds model;
  for (const bool again : {false, true}) {
    const Found found = train(model, aside_of(model), false, again);
    std::vector<std::string> at_once;
    for (const auto& [name, gradient] : found.at_once) at_once.push_back(name);
    // To a product of three dimensions torch adds the bias by itself.
    EXPECT_EQ(at_once,
              (std::vector<std::string>{"flat.bias", "hooked", "mixed", "norm.bias", "norm.weight", "twice.bias"}))
        << again;
    EXPECT_FALSE(found.at_once.at("mixed").equal(found.all.at("mixed")));
  }
  auto others = std::make_shared<WeightsAside>();
  others->set_weights({torch::ones(1)});
  const Found found = train(model, others);
  EXPECT_EQ(found.at_once.size(), found.all.size());
}

TEST(WeightsAside, KeepTheFactorsAlone) {
  torch::nn::Linear linear(8, 8);
  const Tensor x = torch::randn({3, 8}).set_requires_grad(true);
  WeightsAside aside;
  aside.set_weights(linear->parameters());
  const auto weak = [](const Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  };
  Tensor factor = torch::tanh(x), other = torch::tanh(linear(factor));
  Tensor loss = (other * other).sum();
  const auto kept = weak(factor), freed = weak(other);
  aside.part({loss});
  loss.backward();
  loss = factor = other = Tensor();
  EXPECT_FALSE(kept.expired());
  EXPECT_TRUE(freed.expired());
  auto left = aside.take();
  torch::autograd::backward(left.first, left.second);
  left = {};
  EXPECT_TRUE(kept.expired());
  EXPECT_TRUE(linear->weight.grad().defined());
}

/// Notes what happens to it, as a schedule's list calls it.
struct TracedImpl : torch::nn::Module {
  TracedImpl() : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {
    linear->weight.register_hook([this](const Tensor&) { note(StageAction::backward_weight); });
  }
  Tensor forward(const Tensor& x) {
    note(StageAction::forward);
    const Tensor inner = x * 2;
    inner.register_hook([this](const Tensor&) { note(StageAction::backward_input); });
    return linear(inner);
  }
  void note(StageAction action) { done.push_back({action, 0, counts[action]++}); }

  torch::nn::Linear linear;
  std::map<StageAction, int> counts;
  std::vector<StageInstruction> done;
};
TORCH_MODULE(Traced);

TEST(WeightsAside, ComeWhenTheSimulatorHasThem) {
  constexpr int kStages = 3, kMicroBatches = 5;
  const PipelineShape shape{kStages, kMicroBatches};
  EXPECT_GT(simulate(PipelineSchedule::zero_bubble, shape).time, 0.0);  // which refuses lists that cannot be
  run_ranks(kStages, [&](const World& world) {
    Traced traced;
    std::vector<PipelineLayer> layers = {torch::nn::Linear(kWidth, kWidth)};
    for (int stage = 0; stage < kStages; ++stage) layers.emplace_back(traced);  // of which each rank has one
    PipelineOptions options{.num_stages = kStages, .bounds = {0, 2, 3, 4}};
    options.world = world;
    const Config config = config_of(0, 1, kMicroBatches).with(R"({"parallel": {"schedule": "zero_bubble"}})");
    const auto loss = [](const Activations& outputs, const Activations&) { return outputs.at(0).square().mean(); };
    PipelineEngine engine(std::make_shared<PipelineModule>(layers, options), loss, config);
    engine.train_batch([] { return MicroBatch{{torch::ones({2, kWidth})}, {}}; });
    auto wanted = stage_instructions(PipelineSchedule::zero_bubble, shape, world.rank);
    std::erase_if(wanted, [&](const StageInstruction& each) { return !traced->counts.contains(each.action); });
    if (world.rank > 0) {
      EXPECT_EQ(traced->done, wanted);
    }
    // Nobody waits for the first stage's.
    const auto place = [&](StageAction action) {
      return std::ranges::find(traced->done, StageInstruction{action, 0, 0}) - traced->done.begin();
    };
    EXPECT_LT(place(StageAction::backward_weight) - place(StageAction::backward_input), world.rank > 0 ? 9 : 2);
  });
}

}  // namespace
}  // namespace deeptide::parted
