// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every instruction set gives torch's numbers; the public functions have gradients.
#include "ops/kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "deeptide/ops.h"
#include "kernel_modes.h"

namespace deeptide::ops {
namespace {

using at::Tensor;

/// Calls `test` once for each instruction set of this processor that the kernels were compiled for.
template <typename Test>
void on_each_target(Test test) {
  int64_t left = hwy::SupportedTargets() & (HWY_TARGETS);
  ASSERT_NE(left, 0);
  for (; left != 0; left &= left - 1) {
    const int64_t target = int64_t{1} << std::countr_zero(static_cast<uint64_t>(left));
    SCOPED_TRACE(hwy::TargetName(target));
    const Target chosen(target);
    if (target == HWY_AVX2 || target == HWY_AVX3) {
      EXPECT_STREQ(kernel_target(), hwy::TargetName(target));
    }
    test();
  }
}

TEST(GeluKernel, AgreesWithTorchOnEachInstructionSet) {
  on_each_target([] {
    for (const int64_t count : {0, 1, 7, 16, 33, 1000}) {
      const Tensor x = at::randn({count}) * 4, gradient = at::randn({count});
      const Tensor x64 = x.to(at::kDouble);
      Tensor y = at::empty_like(x), x_gradient = at::empty_like(x);
      gelu_tanh_cpu(x, y);
      gelu_tanh_backward_cpu(gradient, x, x_gradient);
      // fp32's rounding of z, about 30, goes into the exponential: 30 x 6e-8.
      EXPECT_TRUE(at::allclose(y.to(at::kDouble), at::gelu(x64, "tanh"), 2e-6, 1e-7)) << count;
      const Tensor exact = at::gelu_backward(gradient.to(at::kDouble), x64, "tanh");
      EXPECT_TRUE(at::allclose(x_gradient.to(at::kDouble), exact, 2e-6, 1e-6)) << count;
    }
  });
}

TEST(LayerNormKernel, AgreesWithTorchOnEachInstructionSet) {
  on_each_target([] {
    for (const int64_t width : {1, 7, 16, 100, 1025}) {
      const int64_t rows = 37;  // several chunks, with an odd one
      const Tensor x = at::randn({rows, width}), residual = at::randn({rows, width}) + 5, weight = at::randn({width});
      const Tensor bias = at::randn({width}), gradient = at::randn({rows, width}), more = at::randn({rows, width});
      const LayerNormResults to{at::empty_like(x), at::empty_like(x), at::empty({rows}), at::empty({rows})};
      layer_norm_cpu({x, residual, weight, bias, 1e-3}, to);
      const LayerNormInputGradients got{at::empty_like(x), at::empty({width}), at::empty({width})};
      layer_norm_backward_cpu({gradient, more, to.summed, to.mean_N, to.rstd_N, weight}, got);

      std::vector<Tensor> leaves;
      for (const Tensor& leaf : {to.summed, weight, bias}) leaves.push_back(leaf.to(at::kDouble).requires_grad_());
      const Tensor exact = at::layer_norm(leaves[0], {width}, leaves[1], leaves[2], 1e-3);
      exact.backward(gradient.to(at::kDouble));
      EXPECT_TRUE(at::equal(to.summed, x + residual));
      EXPECT_TRUE(at::allclose(to.normed.to(at::kDouble), exact, 1e-5, 1e-5)) << width;
      // Errors of sums over 37 rows, and of differences of terms up to 1 / sqrt(eps).
      EXPECT_TRUE(at::allclose(got.x.to(at::kDouble), leaves[0].grad() + more, 1e-4, 1e-4)) << width;
      EXPECT_TRUE(at::allclose(got.weight_D.to(at::kDouble), leaves[1].grad(), 1e-5, 1e-4)) << width;
      EXPECT_TRUE(at::allclose(got.bias_D.to(at::kDouble), leaves[2].grad(), 1e-5, 1e-4)) << width;
    }
  });
}

TEST(CrossEntropyKernel, AgreesWithTorchOnEachInstructionSet) {
  on_each_target([] {
    for (const int64_t classes : {1, 5, 16, 1025, 5000}) {
      const Tensor logits_NV = at::randn({6, classes}) * 3, targets_N = at::randint(classes, {6}, at::kLong);
      const Tensor losses_N = at::empty({6}), gradient_NV = at::empty_like(logits_NV);
      cross_entropy_cpu(logits_NV, targets_N, {.gradient_scale = 0.5}, losses_N, gradient_NV);
      const Tensor exact = logits_NV.to(at::kDouble);
      const Tensor losses = at::cross_entropy_loss(exact, targets_N, {}, at::Reduction::None);
      EXPECT_TRUE(at::allclose(losses_N.to(at::kDouble), losses, 1e-6, 1e-6)) << classes;
      const Tensor gradient = (at::softmax(exact, 1) - at::one_hot(targets_N, classes)) / 2;
      EXPECT_TRUE(at::allclose(gradient_NV.to(at::kDouble), gradient, 1e-5, 1e-7)) << classes;
    }
  });
}

TEST(CrossEntropyKernel, MayWriteTheGradientOverTheLogits) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const Tensor logits_NV = at::randn({9, 777}).to(type), targets_N = at::randint(777, {9}, at::kLong);
    const Tensor apart = at::empty_like(logits_NV), first = at::empty({9}), second = at::empty({9});
    cross_entropy_cpu(logits_NV, targets_N, {}, first, apart);
    cross_entropy_cpu(logits_NV, targets_N, {}, second, logits_NV);
    EXPECT_TRUE(at::equal(first, second));
    EXPECT_TRUE(at::equal(apart, logits_NV));
  }
}

TEST(Operators, AreTorchsWithGradients) {
  Tensor x = at::randn({256, 128}), w = at::randn({128, 128}), b = at::randn({128});
  const Tensor targets = at::randint(128, {256}, at::kLong);
  const auto gradients = [&](const auto& loss) {
    for (Tensor* leaf : {&x, &w, &b}) {
      leaf->set_requires_grad(true);
      leaf->mutable_grad() = Tensor();
    }
    loss().backward();
    return std::vector<Tensor>{x.grad(), w.grad(), b.grad()};
  };
  const auto ours = gradients([&] {
    const auto [normed, summed] = residual_layer_norm(gelu_tanh(ops::linear(x, w, b)), x, {128}, b, b);
    return linear_cross_entropy(ops::layer_norm(summed, {128}) + normed, w, targets);
  });
  const auto torchs = gradients([&] {
    const Tensor summed = at::gelu(at::linear(x, w, b), "tanh") + x;
    const Tensor normed = at::layer_norm(summed, {128}, b, b);
    return at::cross_entropy_loss(at::linear(at::layer_norm(summed, {128}) + normed, w), targets);
  });
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::allclose(ours[i], torchs[i], 1e-4, 1e-5)) << i;
}

}  // namespace
}  // namespace deeptide::ops
