// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values made in parts have the bits of those made at once, and draws in parts leave the generator where it would be.
#include "deferred/parts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "deferred/memory.h"
#include "deferred/recorder.h"

namespace deeptide::deferred {
namespace parts_test {
namespace {

using at::Tensor;

constexpr int64_t kRows = 48, kWidth = 24;

void seed(uint64_t value) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(value);
}

Tensor built(const std::function<Tensor()>& build) {
  const at::NoGradGuard no_grad;
  const Scope scope(/*min_bytes=*/1024);
  seed(5);
  return build();
}

Tensor joined(Parts& parts, int64_t numel, int64_t count) {
  std::vector<Tensor> all;
  for (int64_t begin = 0; begin < numel; begin += count) all.push_back(parts.next(std::min(count, numel - begin)));
  return at::cat(all);
}

void expect_same_bits(const char* what, const std::function<Tensor()>& build) {
  SCOPED_TRACE(what);
  const Tensor tensor = built(build), values = values_of({tensor}).front().flatten();
  for (const int64_t count : {16, 48, 320, 4096}) {
    auto parts = Parts::of(tensor);
    ASSERT_TRUE(parts.has_value());
    EXPECT_TRUE(at::equal(joined(*parts, tensor.numel(), count), values)) << count;
  }
  EXPECT_TRUE(is_deferred(tensor));
}

TEST(Parts, HaveTheBitsOfValuesMadeAtOnce) {
  const auto empty = [] { return at::empty({kRows, kWidth}); };
  expect_same_bits("uniform", [&] { return empty().uniform_(-0.1, 0.1); });
  expect_same_bits("normal", [&] { return empty().normal_(0.5, 2.0); });
  expect_same_bits("drawn twice", [&] { return empty().uniform_().normal_(0.0, 1.0); });
  expect_same_bits("truncated normal",
                   [&] { return empty().uniform_(-0.9, 0.9).erfinv_().mul_(0.02).add_(0.0).clamp_(-0.02, 0.02); });
  expect_same_bits("a row of zeros", [&] {
    const Tensor weight = empty().normal_(0.0, 1.0);
    weight.select(0, 7).zero_();
    return weight;
  });
  expect_same_bits("some rows drawn anew", [&] {
    const Tensor weight = empty().uniform_();
    weight.narrow(0, 10, 20).normal_(3.0, 1.0);
    weight.narrow(0, 5, 1).fill_(4.0);
    return weight;
  });
  expect_same_bits("random factories", [] { return at::randn({kRows, kWidth}); });
  expect_same_bits("uniform factory", [] { return at::rand({kRows, kWidth}); });
  expect_same_bits("constants", [] { return at::full({kRows, kWidth}, 3.0).mul_(2.0); });
  expect_same_bits("ones", [] { return at::ones({kRows, kWidth}); });
  expect_same_bits("cast", [&] { return empty().normal_(0.0, 1.0).to(at::kBFloat16); });
  expect_same_bits("drawn in bf16", [] { return at::empty({kRows, kWidth}, at::kBFloat16).normal_(0.0, 1.0); });
  expect_same_bits("drawn in fp64", [] { return at::empty({kRows, kWidth}, at::kDouble).normal_(0.0, 1.0); });
  const Tensor source = at::arange(kRows * kWidth, at::kFloat).view({kRows, kWidth});
  expect_same_bits("copied", [&] {
    const Tensor weight = empty().copy_(source);
    weight.narrow(0, 3, 4).copy_(source.narrow(0, 0, 4));
    return weight;
  });
}

TEST(Parts, AreNotOfWhatNeedsTheWhole) {
  const auto refused = [](const char* what, const std::function<Tensor()>& build) {
    EXPECT_FALSE(Parts::of(built(build)).has_value()) << what;
  };
  const auto drawn = [] { return at::empty({kRows, kWidth}).normal_(0.0, 1.0); };
  refused("torch draws the last 16 of an odd number anew", [] { return at::empty({33, 33}).normal_(0.0, 1.0); });
  refused("rows that begin between sixteens", [&] {
    const Tensor weight = drawn();
    weight.narrow(0, 1, 2).normal_(0.0, 1.0);
    return weight;
  });
  refused("another order", [&] { return drawn().t(); });
  refused("a part of a memory", [&] { return drawn().narrow(0, 0, 24); });
  refused("a column", [&] {
    const Tensor weight = drawn();
    weight.select(1, 3).zero_();
    return weight;
  });
  refused("two tensors", [&] { return drawn().add_(drawn()); });
  refused("another operator", [&] { return at::cat({drawn(), drawn()}); });
  EXPECT_FALSE(Parts::of(at::ones({kRows})).has_value());
}

TEST(Parts, SayWhereWhatWasCopiedHasChanged) {
  const Tensor source = at::ones({1 << 15});
  const Tensor tensor = built([&] { return at::empty({1 << 15}).copy_(source); });
  source.add_(1);
  auto parts = Parts::of(tensor);
  ASSERT_TRUE(parts.has_value());
  EXPECT_THROW(parts->next(16), c10::ValueError);
}

TEST(Parts, DrawnWhileRecordingLeaveTheGeneratorWhereItWouldBe) {
  const int64_t numel = (int64_t{1} << 21) + 4096;
  const std::vector<std::function<Tensor()>> ways{
      [&] { return at::empty({numel}).normal_(0.0, 1.0); }, [&] { return at::empty({numel + 3}).uniform_(); },
      [&] { return at::empty({numel + 3}).normal_(0.0, 1.0); }, [&] { return at::randn({numel}); },
      [&] { return at::rand({numel}); }};
  for (size_t i = 0; i < ways.size(); ++i) {
    seed(5);
    const Tensor plain = ways[i](), expected = at::rand({5});
    const Tensor tensor = built(ways[i]);
    EXPECT_TRUE(at::equal(expected, at::rand({5}))) << i;
  }
}

}  // namespace
}  // namespace parts_test
}  // namespace deeptide::deferred
