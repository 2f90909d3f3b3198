// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attention by our kernels beside fp64 and beside torch's products in bf16, on every instruction set.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_modes.h"
#include "ops/attention/dense.h"

namespace deeptide::ops {
namespace attention_test {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 1.0 / 256;  // of bf16, which has 8 bits

template <typename Test>
void on_each_target(Test test) {
  for (int64_t left = hwy::SupportedTargets() & (HWY_TARGETS); left != 0; left &= left - 1) {
    const int64_t target = int64_t{1} << std::countr_zero(static_cast<uint64_t>(left));
    SCOPED_TRACE(hwy::TargetName(target));
    const Target chosen(target);
    test();
  }
}

Tensor bf16(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); }
double farthest(const Tensor& got, const Tensor& exact) {
  return (got.to(at::kDouble) - exact).abs().max().item<double>();
}

Tensor future(int64_t rows, int64_t columns) { return at::ones({rows, columns}, at::kBool).triu(1); }

/// A mask for each sequence and head, of terms and of places that are masked.
Tensor some_mask(int64_t sequences, int64_t heads, int64_t rows, int64_t columns) {
  const Tensor mask = at::randn({sequences, heads, rows, columns});
  return mask.masked_fill(mask > 1.0, -kInfinity).index_fill(3, at::zeros({1}, at::kLong), 0.5);
}

TEST(AttentionKernel, GivesSharesAndTheirGradientOnEachInstructionSet) {
  on_each_target([] {
    for (const int64_t columns : {1, 5, 16, 100, 513}) {
      const int64_t sequences = 2, heads = 3, rows = 4;
      const Tensor scores = bf16({sequences * heads, rows, columns}) * 4, gradient = bf16(scores.sizes());
      const Tensor mask = some_mask(sequences, heads, rows, columns);
      const Tensor got = scores.clone(), of_scores = gradient.clone();
      attention_shares_cpu(got, {.scale = 0.5, .causal = false, .mask_NHRC = mask}, 0);
      const Tensor exact = at::softmax(scores.to(at::kDouble) * 0.5 + mask.flatten(0, 1).to(at::kDouble), -1);
      EXPECT_LE(farthest(got, exact), kUnit / 2) << columns;
      attention_gradient_cpu(got, of_scores, 0.5);
      const Tensor shares = got.to(at::kDouble), above = gradient.to(at::kDouble);
      const Tensor slope = shares * (above - (shares * above).sum(-1, true)) * 0.5;
      EXPECT_LE(farthest(of_scores, slope), kUnit * slope.abs().max().item<double>()) << columns;
    }
  });
}

TEST(AttentionKernel, NumbersItsPairsFromTheFirst) {
  const Tensor mask = some_mask(2, 3, 4, 20), scores = bf16({6, 4, 20});
  const Tensor together = scores.clone(), last = scores.narrow(0, 4, 2).clone();
  attention_shares_cpu(together, {.mask_NHRC = mask}, 0);
  attention_shares_cpu(last, {.mask_NHRC = mask}, 4);
  EXPECT_TRUE(at::equal(together.narrow(0, 4, 2), last));
}

TEST(AttentionKernel, SaysNanOfNanAndNothingOfMaskedRows) {
  on_each_target([] {
    const Tensor scores = bf16({1, 4, 20}), mask = at::zeros({1, 1, 4, 20});
    scores.select(1, 0).select(1, 7).fill_(std::nan(""));
    scores.select(1, 1).select(1, 19).fill_(kInfinity);
    mask.select(2, 2).fill_(-kInfinity);
    attention_shares_cpu(scores, {.mask_NHRC = mask}, 0);
    EXPECT_TRUE(scores.select(1, 0).isnan().all().item<bool>());
    EXPECT_TRUE(scores.select(1, 1).isnan().all().item<bool>());
    EXPECT_TRUE((scores.select(1, 2) == 0).all().item<bool>());
    EXPECT_NEAR(scores.select(1, 3).to(at::kDouble).sum().item<double>(), 1.0, 0.05);
  });
}

struct Case {
  int64_t sequences, heads, queries, keys, width;
  bool causal, masked;
};

/// Errors relative to fp64's of our way and of torch's differentiable operators, both in bf16. Both round scores,
/// shares and the scores' gradient, each by a unit at most, and not the same ones.
void compare(const Case& of) {
  const std::vector<int64_t> by_query{of.sequences, of.queries, of.heads, of.width};
  const std::vector<int64_t> by_key{of.sequences, of.keys, of.heads, of.width};
  const Tensor query = bf16(by_query).transpose(1, 2), key = bf16(by_key).transpose(1, 2);
  const Tensor value = bf16(by_key).transpose(1, 2), gradient = bf16(by_query).transpose(1, 2);
  const Tensor mask = of.masked ? some_mask(of.sequences, of.heads, of.queries, of.keys) : Tensor();
  const AttentionTerms terms{1.0 / std::sqrt(static_cast<double>(of.width)), of.causal, mask};

  const auto wide = [](const Tensor& tensor) { return tensor.to(at::kDouble); };
  AttentionTerms exact_terms = terms;
  if (of.masked) exact_terms.mask_NHRC = wide(mask);
  const auto exact = attend_backward_reference(wide(gradient), wide(query), wide(key), wide(value), exact_terms);
  const auto torchs = attend_backward_reference(gradient, query, key, value, terms);
  const auto ours = attend_backward(gradient, query, key, value, terms);
  for (size_t i = 0; i < ours.size(); ++i) {
    const double most = exact[i].abs().max().item<double>();
    EXPECT_LE(farthest(ours[i], exact[i]), 2 * farthest(torchs[i], exact[i]) + 3 * kUnit * most) << i;
    EXPECT_EQ(ours[i].sizes(), exact[i].sizes());
  }

  const auto forward = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    Tensor scores = at::matmul(q, k.transpose(2, 3)) * terms.scale;
    if (of.masked) scores = scores + wide(mask);
    if (of.causal) scores = scores.masked_fill(future(of.queries, of.keys), -kInfinity);
    return at::matmul(at::softmax(scores, -1, at::kDouble).to(v.scalar_type()), v);
  };
  const Tensor result = forward(wide(query), wide(key), wide(value)), got = attend(query, key, value, terms);
  const double of_torch = farthest(forward(query, key, value), result);  // which rounds scores and shares as well
  EXPECT_LE(farthest(got, result), 2 * of_torch + 3 * kUnit * result.abs().max().item<double>());
  EXPECT_TRUE(got.transpose(1, 2).is_contiguous());
}

TEST(Attention, IsAsExactAsTorchsProducts) {
  for (const bool causal : {false, true}) {
    for (const bool masked : {false, true}) {
      compare({2, 3, 17, 17, 8, causal, masked});
      compare({1, 2, 5, 40, 16, causal, masked});
    }
  }
  compare({3, 8, 256, 256, 64, false, true});  // more scores than are in memory at a time
  compare({1, 1, 1, 1, 1, false, false});
}

}  // namespace
}  // namespace attention_test
}  // namespace deeptide::ops
