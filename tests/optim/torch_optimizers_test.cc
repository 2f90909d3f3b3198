// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The rules against LibTorch's own optimizers over many steps; apart, since their headers are slow to compile.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <map>
#include <string>

#include "optim/rules/rule.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int kSteps = 50;

/// Fifty steps on the same gradients, fp32 and with a bf16 copy of the parameters, at small and odd sizes.
template <class Peer, class Options>
void expect_same_path(const Options& options, const Hyperparameters& hyper) {
  const Rule& rule = find_rule(hyper.optimizer()->name);
  for (const int64_t numel : {0, 1, 1003}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      at::manual_seed(11);
      Tensor theirs = at::randn({numel}).requires_grad_();
      Segment ours{theirs.detach().clone(), {}, at::zeros({numel}), {}};
      for (size_t role = 0; role < rule.roles().size(); ++role) {
        ours.states.push_back(rule.keeps(role, hyper) ? at::zeros({numel}) : Tensor());
      }
      if (dtype != at::kFloat) ours.param = at::zeros({numel}, dtype);
      Peer peer(std::vector<Tensor>{theirs}, options);
      for (int step = 1; step <= kSteps; ++step) {
        ours.gradient.rows[0].normal_();
        theirs.mutable_grad() = ours.gradient.rows[0].clone();
        peer.step();
        rule.step(ours, hyper, {step, 1.0});
      }
      // Each step rounds twice or so at 6e-8 of a value near 1; fifty of them drift by less than this.
      EXPECT_TRUE(at::allclose(ours.master, theirs.detach(), 2e-6, 2e-6)) << numel;
      if (dtype != at::kFloat) {
        EXPECT_TRUE(at::equal(ours.param, ours.master.to(dtype))) << numel;
      }
    }
  }
}

Hyperparameters numbers(const char* type, const std::map<std::string, double>& values) {
  Hyperparameters hyper(type);
  for (const auto& [name, value] : values) hyper.set(name, value);
  return hyper;
}

TEST(Adam, FollowsLibTorchsAdamW) {
  expect_same_path<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1),
                                        numbers("AdamW", {{"lr", 1e-2}, {"weight_decay", 0.1}}));
}

TEST(Adam, FollowsLibTorchsAdamWithL2Decay) {
  expect_same_path<torch::optim::Adam>(
      torch::optim::AdamOptions(1e-2).weight_decay(0.1),
      numbers("Adam", {{"lr", 1e-2}, {"weight_decay", 0.1}, {"decoupled_weight_decay", 0}}));
}

TEST(Sgd, FollowsLibTorchsSgd) {
  using Options = torch::optim::SGDOptions;
  const std::map<std::string, double> common{{"lr", 1e-2}, {"weight_decay", 0.01}};
  expect_same_path<torch::optim::SGD>(Options(1e-2).weight_decay(0.01), numbers("SGD", common));
  for (const bool nesterov : {false, true}) {
    const double dampening = nesterov ? 0.0 : 0.1;
    auto values = common;
    values.insert({{"momentum", 0.9}, {"dampening", dampening}, {"nesterov", nesterov}});
    expect_same_path<torch::optim::SGD>(
        Options(1e-2).momentum(0.9).weight_decay(0.01).dampening(dampening).nesterov(nesterov), numbers("SGD", values));
  }
}

TEST(Adagrad, FollowsLibTorchsAdagrad) {
  using Options = torch::optim::AdagradOptions;
  expect_same_path<torch::optim::Adagrad>(Options(1e-2), numbers("Adagrad", {}));
  expect_same_path<torch::optim::Adagrad>(
      Options(1e-1).weight_decay(0.1).lr_decay(0.01).eps(1e-6),
      numbers("Adagrad", {{"lr", 1e-1}, {"weight_decay", 0.1}, {"lr_decay", 0.01}, {"eps", 1e-6}}));
}

TEST(Rmsprop, FollowsLibTorchsRmsprop) {
  using Options = torch::optim::RMSpropOptions;
  expect_same_path<torch::optim::RMSprop>(Options(1e-2), numbers("RMSprop", {}));
  for (const bool centered : {false, true}) {
    // A larger eps: where the centered variance nearly vanishes, its root and the step amplify each rounding.
    const double eps = 1e-2;
    for (const double momentum : {0.0, 0.9}) {
      expect_same_path<torch::optim::RMSprop>(
          Options(1e-2).alpha(0.9).eps(eps).weight_decay(0.1).momentum(momentum).centered(centered),
          numbers(
              "RMSprop",
              {{"alpha", 0.9}, {"eps", eps}, {"weight_decay", 0.1}, {"momentum", momentum}, {"centered", centered}}));
    }
  }
}

/// The operators behind torch.optim's fused=True in Python.
TEST(Adam, FollowsTorchsFusedAdamAndAdamW) {
  constexpr int64_t kNumel = 1003;
  at::manual_seed(12);
  for (const bool decoupled : {true, false}) {
    const auto hyper = numbers("Adam", {{"lr", 1e-2}, {"weight_decay", 0.1}, {"decoupled_weight_decay", decoupled}});
    const Segment ours{at::randn({kNumel}), {at::zeros({kNumel}), at::zeros({kNumel})}, at::zeros({kNumel}), {}};
    Tensor theirs = ours.master.clone(), exp_avg = at::zeros({kNumel}), exp_avg_sq = at::zeros({kNumel});
    const Tensor state_step = at::zeros({}), gradient = ours.gradient.rows[0];
    for (int step = 1; step <= kSteps; ++step) {
      gradient.normal_();
      find_rule("Adam").step(ours, hyper, {step, 1.0});
      state_step.add_(1);
      const double lr = hyper.lr(), beta1 = hyper.get("beta1"), beta2 = hyper.get("beta2");
      const double decay = hyper.get("weight_decay"), eps = hyper.get("eps");
      if (decoupled) {
        at::_fused_adamw_({theirs}, {gradient}, {exp_avg}, {exp_avg_sq}, {}, {state_step}, lr, beta1, beta2, decay, eps,
                          /*amsgrad=*/false, /*maximize=*/false);
      } else {
        at::_fused_adam_({theirs}, {gradient}, {exp_avg}, {exp_avg_sq}, {}, {state_step}, lr, beta1, beta2, decay, eps,
                         /*amsgrad=*/false, /*maximize=*/false);
      }
    }
    EXPECT_TRUE(at::allclose(ours.master, theirs, 2e-6, 2e-6)) << (ours.master - theirs).abs().max().item<float>();
    EXPECT_TRUE(at::allclose(ours.states[0], exp_avg, 1e-6, 1e-7));
    EXPECT_TRUE(at::allclose(ours.states[1], exp_avg_sq, 1e-6, 1e-7));
  }
}

}  // namespace
}  // namespace deeptide::optim
