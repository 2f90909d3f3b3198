// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records operators, replays them, and looks at what a long history leaves behind.
#include "deferred/recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <functional>

#include "deferred/memory.h"

namespace deeptide::deferred {
namespace {

using at::Tensor;

constexpr int64_t kSize = 64;

void seed(uint64_t value) {
  auto generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(value);
}

/// Builds twice, in memory and deferred, and compares values and the generator's next draw.
void expect_equal_built(const std::function<Tensor()>& build) {
  const at::NoGradGuard no_grad;
  seed(5);
  const Tensor plain = build(), next = at::rand({3});
  seed(5);
  Tensor deferred;
  {
    const Scope scope(/*min_bytes=*/1024);
    deferred = build();
    EXPECT_TRUE(is_deferred(deferred));
  }
  EXPECT_TRUE(at::equal(next, at::rand({3}))) << "the generator ends elsewhere";
  const Tensor values = values_of({deferred}).front();
  EXPECT_TRUE(at::equal(plain, values));
  EXPECT_EQ(plain.strides(), values.strides());
  materialize(deferred);
  EXPECT_FALSE(is_deferred(deferred));
  EXPECT_TRUE(at::equal(plain, deferred));
}

TEST(Recorder, ReplaysRandomWritesInViews) {
  expect_equal_built([] {
    Tensor x = at::empty({kSize, kSize});
    x.normal_().mul_(0.5);
    x.select(0, 3).uniform_();
    x.t().narrow(0, 5, 2).narrow(1, 0, 4).copy_(x.narrow(0, 7, 2).narrow(1, 20, 4));
    return x;
  });
}

TEST(Recorder, ReplaysOperatorsWithSeveralResults) {
  expect_equal_built([] {
    auto [q, r] = at::linalg_qr(at::randn({kSize, kSize}));
    q.mul_(r.diagonal().sign());
    return at::cat({q, r.add(q), at::split_with_sizes_copy(q, {16, 48})[1]});
  });
}

TEST(Recorder, KeepsWhatAnOverwrittenTensorGaveToOthers) {
  expect_equal_built([] {
    Tensor x = at::randn({kSize, kSize});
    Tensor y = x.clone();
    x.zero_();
    y.add_(x, 2.0);
    x.add_(y);
    y.fill_(1.0);
    return at::cat({x, y.t()});
  });
}

TEST(Recorder, DrawsFromTheGeneratorThatWasGiven) {
  const auto build = [] {
    auto generator = at::detail::createCPUGenerator(11);
    Tensor x = at::empty({kSize, kSize}).normal_(0, 1, generator);
    generator.set_current_seed(12);  // the record knows what it was
    return x.add(at::empty({kSize, kSize}).uniform_(0, 1, generator));
  };
  expect_equal_built(build);
}

TEST(Recorder, KeepsTheTypeThatWasTheDefault) {
  const at::NoGradGuard no_grad;
  Tensor x;
  {
    const Scope scope(1024);
    const auto before = c10::get_default_dtype();
    c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
    x = at::full({kSize, kSize}, 0.1, at::TensorOptions());
    c10::set_default_dtype(before);
  }
  EXPECT_EQ(x.scalar_type(), at::kDouble);
  EXPECT_EQ(values_of({x}).front().scalar_type(), at::kDouble);
}

TEST(Recorder, LeavesSmallAndWholeNumbersAlone) {
  const Scope scope(1024);
  EXPECT_FALSE(is_deferred(at::ones({8})));
  EXPECT_FALSE(is_deferred(at::ones({kSize, kSize}, at::kLong)));
  EXPECT_TRUE(is_deferred(at::ones({kSize, kSize})));
  const Pause pause(kKey);
  EXPECT_FALSE(is_deferred(at::ones({kSize, kSize})));
}

TEST(Recorder, ForgetsWhatWasOverwritten) {
  const at::NoGradGuard no_grad;
  Tensor x;
  {
    const Scope scope(1024);
    x = at::empty({kSize, kSize}).normal_();
    const std::weak_ptr<Version> drawn = memory_of(x)->now;
    x.fill_(2.0);
    EXPECT_TRUE(drawn.expired());
  }
  EXPECT_EQ(num_memories(), 1);
  x.reset();
  EXPECT_EQ(num_memories(), 0);
}

TEST(Recorder, FreesALongHistoryWithoutRecursion) {
  const at::NoGradGuard no_grad;
  Tensor x;
  {
    const Scope scope(1024);
    x = at::ones({kSize, kSize});
    for (int i = 0; i < 20'000; ++i) x.select(0, i % kSize).add_(1.0);
  }
  EXPECT_EQ(values_of({x}).front().sum().item<double>(), kSize * kSize + 20'000.0 * kSize);
  x.reset();
  EXPECT_EQ(num_memories(), 0);
}

TEST(Recorder, RefusesValuesOfATensorThatChangedSince) {
  const at::NoGradGuard no_grad;
  Tensor source = at::ones({256, 256}), x;
  {
    const Scope scope(1024);
    x = at::empty({256, 256});
    x.copy_(source);
  }
  EXPECT_EQ(values_of({x}).front().sum().item<double>(), 256.0 * 256.0);
  source.add_(1.0);
  EXPECT_THROW(values_of({x}), c10::ValueError);
}

TEST(Recorder, MakesNoValuesForTheirShape) {
  const at::NoGradGuard no_grad;
  const Tensor source = at::ones({1 << 15});
  Tensor deferred;
  {
    const Scope scope;
    deferred = at::empty({1 << 15}).copy_(source);
  }
  source.add_(1);  // so values cannot be made any more
  EXPECT_EQ(at::zeros_like(deferred).sum().item<float>(), 0.0f);
  EXPECT_EQ(deferred.new_ones({3}).sum().item<float>(), 3.0f);
  EXPECT_THROW(deferred.sum(), c10::ValueError);
}

TEST(Recorder, RefusesToLoseAGradient) {
  Tensor x;
  {
    const Scope scope(1024);
    x = at::ones({kSize, kSize});
  }
  x.requires_grad_();
  EXPECT_THROW(x.sum(), c10::ValueError);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(x.sum().item<double>(), kSize * kSize);
}

TEST(Recorder, NamesItselfWhenMemoryIsReadDirectly) {
  Tensor x;
  {
    const Scope scope(1024);
    x = at::ones({kSize, kSize});
  }
  EXPECT_THROW(x.mutable_data_ptr(), c10::Error);
  EXPECT_THROW(x.view({-1}).const_data_ptr(), c10::Error);
}

}  // namespace
}  // namespace deeptide::deferred
