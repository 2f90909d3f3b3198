// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer kernels against LibTorch's own optimizers over many steps; apart, since their headers are slow to
// compile.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "optim/kernels.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int64_t kNumel = 1003;
constexpr int kSteps = 50;

/// Fifty steps on the same gradients; `ours(master, gradient, step)` is one step of the kernel.
template <class Peer, class Options, class Step>
void expect_same_path(const Options& options, const Step& ours) {
  at::manual_seed(11);
  Tensor theirs = at::randn({kNumel}).requires_grad_();
  const Tensor master = theirs.detach().clone();
  Peer peer(std::vector<Tensor>{theirs}, options);
  for (int step = 1; step <= kSteps; ++step) {
    const Tensor gradient = at::randn({kNumel});
    theirs.mutable_grad() = gradient.clone();
    peer.step();
    ours(master, gradient, step);
  }
  // Each step rounds twice or so at 6e-8 of a value near 1; fifty of them drift by less than this.
  EXPECT_TRUE(at::allclose(master, theirs.detach(), 2e-6, 2e-6))
      << (master - theirs.detach()).abs().max().item<float>();
}

template <class Peer, class Options>
void expect_adam(const Options& options, const Hyperparameters& hyper) {
  Tensor exp_avg = at::zeros({kNumel}), exp_avg_sq = at::zeros({kNumel});
  expect_same_path<Peer>(options, [&](const Tensor& master, const Tensor& gradient, int step) {
    adam_step({master, exp_avg, exp_avg_sq, gradient, Tensor()}, hyper, step, 1.0);
  });
}

TEST(AdamStep, FollowsLibTorchsAdamW) {
  Hyperparameters hyper;
  hyper.lr = 1e-2;
  hyper.weight_decay = 0.1;
  expect_adam<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), hyper);
}

TEST(AdamStep, FollowsLibTorchsAdamWithL2Decay) {
  Hyperparameters hyper;
  hyper.lr = 1e-2;
  hyper.weight_decay = 0.1;
  hyper.decoupled_decay = false;
  expect_adam<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).weight_decay(0.1), hyper);
}

TEST(SgdStep, FollowsLibTorchsSgd) {
  Hyperparameters hyper;
  hyper.lr = 1e-2;
  hyper.momentum = 0.9;
  hyper.weight_decay = 0.01;
  for (bool nesterov : {false, true}) {
    hyper.nesterov = nesterov;
    hyper.dampening = nesterov ? 0.0 : 0.1;
    Tensor momentum = at::zeros({kNumel});
    expect_same_path<torch::optim::SGD>(
        torch::optim::SGDOptions(1e-2).momentum(0.9).weight_decay(0.01).dampening(hyper.dampening).nesterov(nesterov),
        [&](const Tensor& master, const Tensor& gradient, int step) {
          sgd_step({master, momentum, gradient, Tensor()}, hyper, step, 1.0);
        });
  }
}

/// The operators behind torch.optim's fused=True in Python.
TEST(AdamStep, FollowsTorchsFusedAdamAndAdamW) {
  at::manual_seed(12);
  for (bool decoupled : {true, false}) {
    Hyperparameters hyper;
    hyper.lr = 1e-2;
    hyper.weight_decay = 0.1;
    hyper.decoupled_decay = decoupled;
    const AdamSegment ours{at::randn({kNumel}), at::zeros({kNumel}), at::zeros({kNumel}), at::zeros({kNumel}),
                           Tensor()};
    Tensor theirs = ours.master.clone(), exp_avg = ours.exp_avg.clone(), exp_avg_sq = ours.exp_avg_sq.clone();
    const Tensor state_step = at::zeros({});
    for (int step = 1; step <= kSteps; ++step) {
      ours.gradient.rows[0].normal_();
      adam_step(ours, hyper, step, 1.0);
      state_step.add_(1);
      if (decoupled) {
        at::_fused_adamw_({theirs}, {ours.gradient.rows[0]}, {exp_avg}, {exp_avg_sq}, {}, {state_step}, hyper.lr,
                          hyper.beta1, hyper.beta2, hyper.weight_decay, hyper.eps, /*amsgrad=*/false,
                          /*maximize=*/false);
      } else {
        at::_fused_adam_({theirs}, {ours.gradient.rows[0]}, {exp_avg}, {exp_avg_sq}, {}, {state_step}, hyper.lr,
                         hyper.beta1, hyper.beta2, hyper.weight_decay, hyper.eps, /*amsgrad=*/false,
                         /*maximize=*/false);
      }
    }
    EXPECT_TRUE(at::allclose(ours.master, theirs, 2e-6, 2e-6)) << (ours.master - theirs).abs().max().item<float>();
    EXPECT_TRUE(at::allclose(ours.exp_avg, exp_avg, 1e-6, 1e-7));
    EXPECT_TRUE(at::allclose(ours.exp_avg_sq, exp_avg_sq, 1e-6, 1e-7));
  }
}

}  // namespace
}  // namespace deeptide::optim
