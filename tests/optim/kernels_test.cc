// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer kernels against their oracle, and bit for bit against themselves however the work is cut.
#include "optim/kernels.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernel_modes.h"
#include "optim/kernels_detail.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 65537};

/// A view of n elements that starts `offset` elements into its storage.
Tensor shifted(const Tensor& values, int64_t offset) {
  Tensor storage = at::zeros({values.numel() + offset + 3}, values.options());
  return storage.narrow(0, offset, values.numel()).copy_(values);
}

AdamSegment adam_segment(int64_t numel, at::ScalarType param_dtype = at::kFloat, int64_t offset = 0) {
  AdamSegment made{shifted(at::randn({numel}), offset), shifted(at::randn({numel}) * 0.1, offset),
                   shifted(at::rand({numel}) * 0.01, offset), shifted(at::randn({numel}), offset), Tensor()};
  if (param_dtype != at::kFloat) made.param = shifted(at::zeros({numel}, param_dtype), offset);
  return made;
}

Tensor copy_of(const Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; }

AdamSegment copy_of(const AdamSegment& s) {
  return {copy_of(s.master), copy_of(s.exp_avg), copy_of(s.exp_avg_sq), s.gradient, copy_of(s.param)};
}

AdamSegment narrow(const AdamSegment& s, int64_t begin, int64_t length) {
  return {s.master.narrow(0, begin, length), s.exp_avg.narrow(0, begin, length), s.exp_avg_sq.narrow(0, begin, length),
          s.gradient.narrow(begin, length), s.param.defined() ? s.param.narrow(0, begin, length) : Tensor()};
}

bool same_bits(const AdamSegment& a, const AdamSegment& b) {
  return at::equal(a.master, b.master) && at::equal(a.exp_avg, b.exp_avg) && at::equal(a.exp_avg_sq, b.exp_avg_sq) &&
         (!a.param.defined() || at::equal(a.param, b.param));
}

/// The step in doubles, from the definition rather than from the kernel's order of operations.
Tensor adam_in_double(const AdamSegment& s, const Hyperparameters& h, int64_t step, double gradient_scale) {
  const Tensor p = s.master.to(at::kDouble);
  Tensor g = s.gradient.sum().to(at::kDouble) * gradient_scale;
  if (!h.decoupled_decay) g = g + p * h.weight_decay;
  const Tensor m = s.exp_avg.to(at::kDouble) * h.beta1 + g * (1 - h.beta1);
  const Tensor v = s.exp_avg_sq.to(at::kDouble) * h.beta2 + g * g * (1 - h.beta2);
  const double c1 = h.bias_correction ? 1 - std::pow(h.beta1, step) : 1;
  const double c2 = h.bias_correction ? 1 - std::pow(h.beta2, step) : 1;
  const Tensor kept = h.decoupled_decay ? p * (1 - h.lr * h.weight_decay) : p;
  return kept - (m / c1) / ((v / c2).sqrt() + h.eps) * h.lr;
}

std::vector<Hyperparameters> adam_variants() {
  std::vector<Hyperparameters> variants(6);
  variants[1].weight_decay = 0.1;
  variants[2].weight_decay = 0.1;
  variants[2].decoupled_decay = false;
  variants[3].bias_correction = false;
  variants[4].beta1 = 0.0;
  variants[4].beta2 = 0.5;
  variants[5].beta1 = 0.3;
  variants[5].eps = 1e-3;
  return variants;
}

TEST(AdamStep, AgreesWithTheDefinitionInDoublesAndWithTheOracle) {
  at::manual_seed(1);
  for (const auto& hyper : adam_variants()) {
    for (int64_t numel : kSizes) {
      for (int64_t step : {1, 2, 1000}) {
        AdamSegment kernel = adam_segment(numel), oracle = copy_of(kernel);
        const Tensor expected = adam_in_double(kernel, hyper, step, 0.5);
        adam_step(kernel, hyper, step, 0.5);
        detail::adam_step_reference(oracle, detail::adam_scalars(hyper, step, 0.5));
        // A dozen fp32 roundings of 6e-8 each, on the update and on the sum.
        ASSERT_TRUE(at::allclose(kernel.master.to(at::kDouble), expected, 1e-6, 1e-6)) << numel;
        ASSERT_TRUE(at::allclose(kernel.master, oracle.master, 5e-7, 1e-7)) << numel;
        ASSERT_TRUE(at::allclose(kernel.exp_avg, oracle.exp_avg, 5e-7, 1e-7)) << numel;
        ASSERT_TRUE(at::allclose(kernel.exp_avg_sq, oracle.exp_avg_sq, 5e-7, 1e-9)) << numel;
      }
    }
  }
}

/// The gradient's rows are summed as they are read: the same bits as from the sum that `ordered_sum` writes.
TEST(AdamStep, SumsTheRowsOfItsGradientAsTheOrderedSumDoes) {
  at::manual_seed(21);
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int64_t world : {1, 2, 3, 70}) {
      for (int64_t numel : kSizes) {
        const auto rows = (at::randn({world, numel + 3}) * 3).to(dtype).narrow(1, 1, numel).unbind(0);
        const numerics::Contributions apart(rows, 0.3);
        AdamSegment direct = adam_segment(numel, at::kBFloat16), summed = copy_of(direct);
        direct.gradient = apart;
        Tensor sum = at::empty({numel}), squares = at::empty({1}, at::kDouble), alone = at::empty({1}, at::kDouble);
        numerics::ordered_sum(rows, 0.3, /*overwrite=*/true, sum, squares);
        numerics::ordered_squares(apart, alone);
        summed.gradient = {sum};
        adam_step(direct, Hyperparameters(), 2, 0.5);
        adam_step(summed, Hyperparameters(), 2, 0.5);
        ASSERT_TRUE(same_bits(direct, summed)) << dtype << " " << world << "x" << numel;
        ASSERT_EQ(squares.item<double>(), alone.item<double>()) << dtype << " " << world << "x" << numel;
        SgdSegment one{direct.master.clone(), Tensor(), apart, Tensor()}, two{one.master.clone(), Tensor(), {sum}, {}};
        sgd_step(one, Hyperparameters(), 1, 0.5);
        sgd_step(two, Hyperparameters(), 1, 0.5);
        ASSERT_TRUE(at::equal(one.master, two.master)) << dtype << " " << world << "x" << numel;
      }
    }
  }
}

TEST(AdamStep, WritesLargeParametersPastTheCacheAsItWritesSmallOnes) {
  at::manual_seed(22);
  constexpr int64_t kNumel = (1 << 20) + 4099;
  for (int64_t offset : {0, 3}) {  // what is not aligned goes through the cache
    AdamSegment segment = adam_segment(kNumel, at::kBFloat16, offset);
    adam_step(segment, Hyperparameters(), 1, 1.0);
    EXPECT_TRUE(at::equal(segment.param, segment.master.to(at::kBFloat16)));
    SgdSegment sgd{segment.master, Tensor(), segment.gradient, segment.param};
    sgd_step(sgd, Hyperparameters(), 1, 1.0);
    EXPECT_TRUE(at::equal(sgd.param, sgd.master.to(at::kBFloat16)));
  }
}

TEST(AdamStep, IsBitEqualHoweverTheShardIsCut) {
  at::manual_seed(2);
  std::mt19937 random(3);
  Hyperparameters hyper;
  hyper.weight_decay = 0.1;
  for (bool decoupled : {true, false}) {
    hyper.decoupled_decay = decoupled;
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      AdamSegment whole = adam_segment(70001, dtype), cut = copy_of(whole);
      adam_step(whole, hyper, 3, 0.25);
      for (int64_t begin = 0, length; begin < 70001; begin += length) {
        length = std::min<int64_t>(70001 - begin, std::uniform_int_distribution<int64_t>(1, 2000)(random));
        adam_step(narrow(cut, begin, length), hyper, 3, 0.25);
      }
      ASSERT_TRUE(same_bits(whole, cut)) << dtype;
    }
  }
}

TEST(AdamStep, IsBitEqualAtAnyAlignmentAndLeavesNeighboursAlone) {
  at::manual_seed(4);
  for (int64_t numel : kSizes) {
    for (int64_t offset : {1, 3, 5, 13}) {
      AdamSegment aligned = adam_segment(numel, at::kBFloat16);
      AdamSegment odd{shifted(aligned.master, offset), shifted(aligned.exp_avg, offset),
                      shifted(aligned.exp_avg_sq, offset), shifted(aligned.gradient.sum(), offset),
                      shifted(aligned.param, offset)};
      adam_step(aligned, Hyperparameters(), 1, 1.0);
      adam_step(odd, Hyperparameters(), 1, 1.0);
      ASSERT_TRUE(same_bits(aligned, odd)) << numel << " at " << offset;
      for (const Tensor& view : {odd.master, odd.exp_avg, odd.exp_avg_sq, odd.param}) {
        const Tensor storage = view.as_strided({numel + offset + 3}, {1}, 0);
        ASSERT_EQ(storage.narrow(0, 0, offset).count_nonzero().item<int64_t>(), 0);
        ASSERT_EQ(storage.narrow(0, offset + numel, 3).count_nonzero().item<int64_t>(), 0);
      }
    }
  }
}

TEST(AdamStep, IsBitEqualForOneAndTwoThreads) {
  at::manual_seed(5);
  AdamSegment one = adam_segment(300007, at::kBFloat16), two = copy_of(one);
  {
    Threads threads(1);
    adam_step(one, Hyperparameters(), 1, 1.0);
  }
  Threads threads(2);
  adam_step(two, Hyperparameters(), 1, 1.0);
  EXPECT_TRUE(same_bits(one, two));
}

TEST(AdamStep, AgreesOnEveryInstructionSetOfThisMachine) {
  at::manual_seed(6);
  const AdamSegment start = adam_segment(1003, at::kBFloat16);
  AdamSegment expected = copy_of(start);
  adam_step(expected, Hyperparameters(), 1, 1.0);
  for (int64_t target : {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}}) {
    if (target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
    AdamSegment got = copy_of(start);
    {
      Target chosen(target);
      if (target != HWY_SCALAR) {
        EXPECT_STREQ(kernel_target(), hwy::TargetName(target));
      }
      adam_step(got, Hyperparameters(), 1, 1.0);
    }
    ASSERT_TRUE(at::allclose(got.master, expected.master, 5e-7, 1e-7)) << hwy::TargetName(target);
    ASSERT_TRUE(at::equal(got.param, got.master.to(at::kBFloat16))) << hwy::TargetName(target);
  }
}

/// Runs a step that leaves `values` as they are, so that `param` gets exactly their rounding.
Tensor rounded_by_kernel(const Tensor& values, at::ScalarType dtype) {
  SgdSegment segment{values.clone(), Tensor(), at::zeros_like(values), at::zeros({values.numel()}, dtype)};
  Hyperparameters hyper;
  hyper.lr = 0.0;
  sgd_step(segment, hyper, 1, 1.0);
  return segment.param;
}

TEST(ParamOutput, EqualsTorchsCastBitForBit) {
  at::manual_seed(7);
  // Every pattern of the upper 17 bits with lower bits below, at and above a tie, in both signs; and random ones.
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low : {0x0000u, 0x7FFFu, 0x8000u, 0x8001u, 0x1000u, 0x2FFFu, 0x3000u}) {
      const float value = std::bit_cast<float>(high << 16 | low);
      if (!std::isnan(value)) values.push_back(value);
    }
  }
  const Tensor all = at::tensor(values);
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (int64_t target : {int64_t{0}, int64_t{HWY_SCALAR}}) {
      Target chosen(target);
      const Tensor got = rounded_by_kernel(all, dtype);
      ASSERT_TRUE(at::equal(got.view(at::kShort), all.to(dtype).view(at::kShort))) << dtype;
    }
  }
}

TEST(ParamOutput, KeepsNaNs) {
  const float nan_that_rounding_would_carry = std::bit_cast<float>(0x7FFFFFFFu);
  const Tensor values = at::tensor({nan_that_rounding_would_carry, -nan_that_rounding_would_carry,
                                    std::bit_cast<float>(0x7F800001u), std::nanf("")});
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    EXPECT_TRUE(rounded_by_kernel(values, dtype).isnan().all().item<bool>()) << dtype;
  }
}

TEST(AdamStep, CarriesNaNOfAGradientToItsElementOnly) {
  AdamSegment segment = adam_segment(37, at::kBFloat16);
  segment.gradient.rows[0][19] = std::numeric_limits<float>::quiet_NaN();
  adam_step(segment, Hyperparameters(), 1, 1.0);
  for (const Tensor& tensor : {segment.master, segment.exp_avg, segment.exp_avg_sq, segment.param}) {
    EXPECT_TRUE(tensor[19].isnan().item<bool>());
    EXPECT_EQ(tensor.isnan().sum().item<int64_t>(), 1);
  }
}

std::vector<Hyperparameters> sgd_variants() {
  std::vector<Hyperparameters> variants(5);
  for (auto& hyper : variants) hyper.lr = 0.1;
  variants[1].weight_decay = 0.01;
  variants[2].momentum = 0.9;
  variants[3].momentum = 0.9;
  variants[3].dampening = 0.2;
  variants[3].weight_decay = 0.01;
  variants[4].momentum = 0.9;
  variants[4].nesterov = true;
  return variants;
}

TEST(SgdStep, AgreesWithTheOracleOverThreeSteps) {
  at::manual_seed(8);
  for (const auto& hyper : sgd_variants()) {
    for (int64_t numel : kSizes) {
      SgdSegment kernel{at::randn({numel}), Tensor(), at::randn({numel}), at::zeros({numel}, at::kBFloat16)};
      // The buffer holds garbage before step 1 and must not be read then.
      if (hyper.momentum != 0) kernel.momentum = at::full({numel}, std::nanf(""));
      SgdSegment oracle{kernel.master.clone(), copy_of(kernel.momentum), kernel.gradient, kernel.param.clone()};
      for (int64_t step = 1; step <= 3; ++step) {
        sgd_step(kernel, hyper, step, 0.5);
        detail::sgd_step_reference(oracle, detail::sgd_scalars(hyper, step, 0.5));
      }
      ASSERT_TRUE(at::allclose(kernel.master, oracle.master, 5e-7, 1e-7)) << numel;
      if (hyper.momentum != 0) {
        ASSERT_TRUE(at::allclose(kernel.momentum, oracle.momentum, 5e-7, 1e-7)) << numel;
      }
      ASSERT_TRUE(at::equal(kernel.param, kernel.master.to(at::kBFloat16))) << numel;
    }
  }
}

TEST(SgdStep, IsBitEqualHoweverTheShardIsCutAndForOneOrTwoThreads) {
  at::manual_seed(9);
  std::mt19937 random(10);
  const auto hyper = sgd_variants()[4];
  const int64_t numel = 70001;
  SgdSegment whole{at::randn({numel}), at::randn({numel}), at::randn({numel}), at::zeros({numel}, at::kHalf)};
  SgdSegment cut{whole.master.clone(), whole.momentum.clone(), whole.gradient, whole.param.clone()};
  {
    Threads threads(2);
    sgd_step(whole, hyper, 2, 1.0);
  }
  Threads threads(1);
  for (int64_t begin = 0, length; begin < numel; begin += length) {
    length = std::min(numel - begin, std::uniform_int_distribution<int64_t>(1, 2000)(random));
    sgd_step({cut.master.narrow(0, begin, length), cut.momentum.narrow(0, begin, length),
              cut.gradient.narrow(begin, length), cut.param.narrow(0, begin, length)},
             hyper, 2, 1.0);
  }
  EXPECT_TRUE(at::equal(whole.master, cut.master));
  EXPECT_TRUE(at::equal(whole.momentum, cut.momentum));
  EXPECT_TRUE(at::equal(whole.param, cut.param));
}

TEST(AdamStep, RejectsTensorsThatDoNotFit) {
  const Hyperparameters hyper;
  const auto rejects = [&](auto spoil, const std::string& word) {
    AdamSegment segment = adam_segment(8, at::kBFloat16);
    spoil(segment);
    try {
      adam_step(segment, hyper, 1, 1.0);
      ADD_FAILURE() << "accepted; expected an error about " << word;
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  rejects([](AdamSegment& s) { s.master = Tensor(); }, "master");
  rejects([](AdamSegment& s) { s.master = s.master.to(at::kDouble); }, "master is Double");
  rejects([](AdamSegment& s) { s.gradient = {at::zeros({7})}; }, "gradient has shape [7]");
  rejects([](AdamSegment& s) { s.exp_avg = s.exp_avg.to(at::kBFloat16); }, "exp_avg is BFloat16");
  rejects([](AdamSegment& s) { s.exp_avg_sq = at::zeros({16}).slice(0, 0, 16, 2); }, "exp_avg_sq is not contiguous");
  rejects([](AdamSegment& s) { s.exp_avg_sq = Tensor(); }, "exp_avg_sq is undefined");
  rejects([](AdamSegment& s) { s.gradient = {at::empty({8}, at::TensorOptions(at::kMeta))}; }, "gradient is on meta");
  rejects([](AdamSegment& s) { s.param = at::zeros({8}); }, "param is Float");
  AdamSegment segment = adam_segment(8);
  EXPECT_THROW(adam_step(segment, hyper, 0, 1.0), c10::ValueError);
}

TEST(SgdStep, RejectsAMomentumBufferThatDoesNotFitTheMomentum) {
  Hyperparameters hyper;
  const Tensor values = at::zeros({4});
  EXPECT_THROW(sgd_step({values, values.clone(), values.clone(), Tensor()}, hyper, 1, 1.0), c10::ValueError);
  hyper.momentum = 0.9;
  EXPECT_THROW(sgd_step({values, Tensor(), values.clone(), Tensor()}, hyper, 1, 1.0), c10::ValueError);
  EXPECT_THROW(sgd_step({values, at::zeros({5}), values.clone(), Tensor()}, hyper, 1, 1.0), c10::ValueError);
}

}  // namespace
}  // namespace deeptide::optim
