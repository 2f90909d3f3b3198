// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counted products equal closed formulae, in forward and backward, once each.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>

#include "deeptide/profiler.h"
#include "report/flops/roofline.h"

namespace deeptide::report {
namespace {

struct Totals {
  int64_t forward = 0, backward = 0;
};

Totals macs(const OperatorCounter& counter) {
  Totals totals;
  for (const OperatorUse& use : counter.uses()) (use.backward ? totals.backward : totals.forward) += use.macs;
  return totals;
}

// A CPU without a type's instructions multiplies a thousand times slower: a report does not wait for a large product.
TEST(MachinePeak, IsMeasuredOnTheLargestProductThatEndsSoon) {
  std::vector<int64_t> sides;
  int64_t most = 1024;  // that memory has room for
  const auto at = [&](double rate) {
    sides.clear();
    const auto work = [](int64_t side) { return 2.0 * static_cast<double>(side * side * side); };
    return rate_of_largest(128, 1024, 0.1, work, [&](int64_t side) {
      sides.push_back(side);
      TORCH_CHECK_WITH(OutOfMemoryError, side <= most, "no memory for ", side);
      return rate + static_cast<double>(side);
    });
  };
  EXPECT_EQ(at(1e11), 1e11 + 1024);
  EXPECT_EQ(sides, (std::vector<int64_t>{128, 256, 512, 1024}));
  EXPECT_EQ(at(1e9), 1e9 + 256);  // 0.27 s for the next
  EXPECT_EQ(at(1e8), 1e8 + 128);
  EXPECT_EQ(sides, std::vector<int64_t>{128});
  most = 300;
  EXPECT_EQ(at(1e11), 1e11 + 256);
}

TEST(OperatorCounter, CountsALinearLayerBothWays) {
  torch::nn::Linear layer(10, 6);
  const auto x = torch::randn({4, 10}, torch::requires_grad());
  OperatorCounter counter;
  layer(x).sum().backward();
  const Totals totals = macs(counter);
  EXPECT_EQ(totals.forward, 4 * 10 * 6);
  EXPECT_EQ(totals.backward, 2 * 4 * 10 * 6);  // the gradients of the weight and of the input
}

TEST(OperatorCounter, CountsConvolutionsWithStridesGroupsAndDilation) {
  using Options = torch::nn::Conv2dOptions;
  torch::nn::Conv2d conv(Options(4, 8, 3).stride(2).padding(1).groups(2).dilation(2));
  const auto x = torch::randn({3, 4, 11, 9}, torch::requires_grad());
  OperatorCounter counter;
  const auto y = conv(x);
  EXPECT_EQ(macs(counter).forward, y.numel() * (4 / 2) * 3 * 3);
  y.sum().backward();
  EXPECT_EQ(macs(counter).backward, 2 * macs(counter).forward);
}

TEST(OperatorCounter, CountsAttentionOnceWhateverItCalls) {
  const auto q = torch::randn({2, 3, 5, 8}), k = torch::randn({2, 3, 7, 8});
  OperatorCounter counter;
  const c10::InferenceMode guard;
  at::scaled_dot_product_attention(q, k, k);
  EXPECT_EQ(macs(counter).forward, 2 * 3 * 5 * 7 * (8 + 8));
}

TEST(OperatorCounter, GivesBackwardToTheModuleOfItsForward) {
  torch::nn::Linear first(8, 8), second(8, 3);
  const auto x = torch::randn({2, 8}, torch::requires_grad());
  OperatorCounter counter;
  counter.set_module(1);
  auto y = first(x);
  counter.set_module(2);
  y = second(y).sum();
  counter.set_module(-1);
  y.backward();
  std::map<int, int64_t> backward;
  for (const OperatorUse& use : counter.uses()) {
    if (use.backward) backward[use.module] += use.macs;
  }
  EXPECT_EQ(backward[1], 2 * 2 * 8 * 8);
  EXPECT_EQ(backward[2], 2 * 2 * 8 * 3);
  EXPECT_EQ(backward[-1], 0);
}

TEST(OperatorCounter, CountsBytesOfWhatMovesAndNotOfViews) {
  const auto x = torch::randn({256}), y = torch::randn({256});
  OperatorCounter counter;
  const c10::InferenceMode guard;
  (x + y).view({16, 16}).t();
  int64_t bytes = 0;
  for (const OperatorUse& use : counter.uses()) bytes += use.bytes;
  EXPECT_EQ(bytes, 3 * 256 * 4);
}

TEST(OperatorCounter, NamesWhatMayMultiplyAndHasNoFormula) {
  const auto x = torch::eye(8);
  OperatorCounter counter;
  const c10::InferenceMode guard;
  at::linalg_qr(x);
  at::linalg_matrix_power(x, 3);  // by products, which count
  at::fft_rfft(x);
  at::linalg_vector_norm(x);
  std::set<std::string> named;
  for (const OperatorUse& use : counter.uses()) {
    if (use.is_uncounted) named.insert(use.name);
  }
  EXPECT_EQ(named, (std::set<std::string>{"aten::_fft_r2c", "aten::linalg_qr"}));
  EXPECT_EQ(macs(counter).forward, 2 * 8 * 8 * 8);
}

TEST(OperatorCounter, CountsOuterProducts) {
  const auto a = torch::randn(5), b = torch::randn(7);
  OperatorCounter counter;
  const c10::InferenceMode guard;
  at::outer(a, b);
  at::addr(torch::zeros({5, 7}), a, b);
  EXPECT_EQ(macs(counter).forward, 2 * 5 * 7);
}

// A share above 1 says that the measured product was not the fastest way to multiply, and nothing of the model.
TEST(MachinePeak, GivesNoShareOfMoreThanAll) {
  const MachinePeak peak{.flops_per_s = 1e9, .bytes_per_s = 1e9};
  EXPECT_DOUBLE_EQ(peak.share_of(5e8, 1.0), 0.5);
  EXPECT_EQ(peak.share_of(3.7e9, 1.0), -1.0);
  EXPECT_EQ(peak.share_of(5e8, 0.0), -1.0);
}

TEST(OperatorCounter, LeavesNoCallbackBehind) {
  { const OperatorCounter one, other; }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(Roofline, TellsProductsFromMoves) {
  const MachinePeak peak{.flops_per_s = 1e9, .bytes_per_s = 1e9};
  const OperatorUse products{.name = "aten::mm", .calls = 1, .macs = 1'000'000, .bytes = 1000, .seconds = 0.003};
  const OperatorUse moves{.name = "aten::add", .calls = 1, .bytes = 1'000'000, .seconds = 0.001};
  const Roofline timed = judge({products, moves}, peak, true);
  EXPECT_DOUBLE_EQ(timed.memory_bound, 0.25);
  EXPECT_DOUBLE_EQ(timed.bytes_per_s, 1e9);
  EXPECT_DOUBLE_EQ(judge({products, moves}, peak, false).memory_bound, 1.0 / 3.0);  // 2 ms against 1 ms
  EXPECT_EQ(timed.macs, 1'000'000);
}

}  // namespace
}  // namespace deeptide::report
