// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The two passes of a step by signs: kernels agree with ATen operators, and with themselves however a shard is cut.
#include "optim/compressed/compressed_rule.h"

#include <ATen/ops/allclose.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "optim/segments.h"

namespace deeptide::optim {
namespace {

using at::Tensor;

constexpr int64_t kNumels[] = {0, 1, 7, 16, 65, 1000, 65537};

const CompressedRule& compressed(const char* type) { return dynamic_cast<const CompressedRule&>(find_rule(type)); }
const CompressedElementRule& one_bit_adam() {
  return dynamic_cast<const CompressedElementRule&>(find_rule("OneBitAdam"));
}
const CompressedNormRule& one_bit_lamb() { return dynamic_cast<const CompressedNormRule&>(find_rule("OneBitLamb")); }

TEST(CompressedRule, AgreesWithItsReferenceInBothPasses) {
  at::manual_seed(31);
  const CompressedElementRule& rule = one_bit_adam();  // and ZeroOneAdam, which has the same passes
  for (const Hyperparameters& hyper : variants_of(rule)) {
    for (const int64_t numel : kNumels) {
      const Segment kernel = make_segment(rule, hyper, numel, at::kBFloat16), reference = copy_of(kernel);
      const Tensor carried = at::randn({numel}), plain = carried.clone(), mean = at::randn({numel});
      rule.offer(kernel, hyper, {3, 0.5}, carried);
      rule.offer_reference(reference, hyper, {3, 0.5}, plain);
      // A few fp32 roundings of 6e-8 of values up to 5; the reference does not fuse its multiply-adds.
      ASSERT_TRUE(at::allclose(carried, plain, 1e-6, 1e-6)) << numel;
      ASSERT_TRUE(same_bits(kernel, reference)) << "an offer moves nothing";
      rule.take(kernel, hyper, {3, 0.5}, mean);
      rule.take_reference(reference, hyper, {3, 0.5}, mean);
      ASSERT_TRUE(at::equal(kernel.states[0], mean)) << numel;
      ASSERT_TRUE(at::equal(kernel.states[1], reference.states[1])) << "the second moment is frozen";
      ASSERT_TRUE(at::allclose(kernel.master, reference.master, 2e-6, 5e-7)) << numel;
      ASSERT_TRUE(at::equal(kernel.param, kernel.master.to(at::kBFloat16))) << numel;
    }
  }
}

TEST(CompressedRule, IsBitEqualHoweverAShardIsCut) {
  at::manual_seed(32);
  const CompressedElementRule& rule = one_bit_adam();
  const Hyperparameters hyper(rule.info());
  constexpr int64_t kNumel = 10'001, kCut = 4'099;
  const Segment whole = make_segment(rule, hyper, kNumel, at::kBFloat16), cut = copy_of(whole);
  const Tensor carried = at::randn({kNumel}), pieces = carried.clone(), mean = at::randn({kNumel});
  rule.offer(whole, hyper, {3, 0.5}, carried);
  rule.take(whole, hyper, {3, 0.5}, mean);
  for (const auto& [begin, length] : {std::pair(int64_t{0}, kCut), std::pair(kCut, kNumel - kCut)}) {
    const Segment piece = narrow(cut, begin, length);
    rule.offer(piece, hyper, {3, 0.5}, pieces.narrow(0, begin, length));
    rule.take(piece, hyper, {3, 0.5}, mean.narrow(0, begin, length));
  }
  EXPECT_TRUE(at::equal(carried, pieces));
  EXPECT_TRUE(same_bits(whole, cut));
}

TEST(CompressedNormRule, TakesStatesAsItsDefinitionInDoublesSays) {
  at::manual_seed(33);
  const CompressedNormRule& rule = one_bit_lamb();
  for (const Hyperparameters& hyper : variants_of(rule)) {
    for (const int64_t numel : {1, 7, 65, 1000, 65'537}) {
      for (const double frozen : {0.0, 1.0}) {
        const Segment segment = make_segment(rule, hyper, numel);
        for (const size_t second : {1, 2}) segment.states[second].abs_();
        const Tensor mean = at::randn({numel}), m = segment.states[0].to(at::kDouble),
                     v = segment.states[1].to(at::kDouble), p = segment.master.to(at::kDouble),
                     w = frozen == 0.0 ? v : segment.states[2].to(at::kDouble);
        const std::vector<double> numbers{0.5, 1.0, frozen};
        const Segment plain = copy_of(segment);
        TakenSums sums(numel), plain_sums(numel);
        rule.take_states(segment, hyper, numbers, mean, 0, sums);
        rule.take_states_reference(plain, hyper, numbers, mean, 0, plain_sums);
        const double beta1 = hyper.get("beta1"), beta2 = hyper.get("beta2"), eps = hyper.get("eps");
        const Tensor g = (mean.to(at::kDouble) - m * beta1) / (1 - beta1);
        const Tensor moved = w * beta2 + g * g * (1 - beta2), root = v.sqrt() + eps;
        const Tensor direction = mean.to(at::kDouble) / root, update = direction + p * hyper.get("weight_decay");
        ASSERT_TRUE(at::equal(segment.states[0], mean));
        ASSERT_TRUE(at::equal(segment.states[1].to(at::kDouble), v)) << "the second moment is frozen";
        // A handful of fp32 roundings of 6e-8; g cancels, so that its error is one of the momenta's size.
        ASSERT_TRUE(at::allclose(segment.states[2].to(at::kDouble), moved, 1e-5, 1e-6)) << numel;
        const auto near = [&](double value, const Tensor& expected) {
          EXPECT_NEAR(value, expected.item<double>(), 2e-5 * expected.item<double>()) << numel;
        };
        near(sums.totals().factor, (root / (moved.sqrt() + eps)).max());
        near(sums.direction.total(), direction.square().sum());
        near(sums.update.total(), update.square().sum());
        ASSERT_TRUE(at::equal(plain.states[0], mean));
        ASSERT_TRUE(at::allclose(plain.states[2], segment.states[2], 1e-5, 1e-6)) << numel;
        near(plain_sums.totals().factor, (root / (moved.sqrt() + eps)).max());
        near(plain_sums.direction.total(), direction.square().sum());
        near(plain_sums.update.total(), update.square().sum());
      }
    }
  }
}

TEST(CompressedNormRule, IsBitEqualHoweverAParameterIsCut) {
  at::manual_seed(34);
  const CompressedNormRule& rule = one_bit_lamb();
  const Hyperparameters hyper(rule.info());
  constexpr int64_t kNumel = 100'001, kCut = 40'999;
  const Segment whole = make_segment(rule, hyper, kNumel), cut = copy_of(whole);
  const Tensor mean = at::randn({kNumel});
  const std::vector<double> numbers{0.5, 1.0, 0.0};
  TakenSums sums(kNumel), pieces(kNumel);
  rule.take_states(whole, hyper, numbers, mean, 0, sums);
  for (const auto& [begin, length] : {std::pair(int64_t{0}, kCut), std::pair(kCut, kNumel - kCut)}) {
    rule.take_states(narrow(cut, begin, length), hyper, numbers, mean.narrow(0, begin, length), begin, pieces);
  }
  EXPECT_TRUE(same_bits(whole, cut));
  EXPECT_EQ(sums.totals().factor, pieces.totals().factor);
  EXPECT_EQ(sums.direction.total(), pieces.direction.total());
  EXPECT_EQ(sums.update.total(), pieces.update.total());
}

TEST(CompressedNormRule, MovesItsFactorWithinItsBounds) {
  const CompressedNormRule& rule = one_bit_lamb();
  Hyperparameters hyper(rule.info());
  hyper.set("factor_threshold", 0.1).set("factor_min", 0.5).set("factor_max", 1.2);
  std::vector<double> numbers{2.0, 1.0, 0.0};
  const TakenTotals far{.factor = 100.0}, little{.factor = 0.001};
  EXPECT_DOUBLE_EQ(rule.taken_ratio(far, hyper, numbers), 2.0 * 1.1);
  EXPECT_DOUBLE_EQ(rule.taken_ratio(far, hyper, numbers), 2.0 * 1.2);
  EXPECT_DOUBLE_EQ(rule.taken_ratio(little, hyper, numbers), 2.0 * 1.2 * 0.9);
  for (int step = 0; step < 20; ++step) rule.taken_ratio(little, hyper, numbers);
  EXPECT_DOUBLE_EQ(numbers[1], 0.5);
  numbers[0] = 0.0;  // its ratio has been 1 throughout
  EXPECT_DOUBLE_EQ(rule.taken_ratio(little, hyper, numbers), 0.5);
}

TEST(CompressedRule, RefusesWhatDoesNotFit) {
  const CompressedElementRule& rule = one_bit_adam();
  const Hyperparameters hyper(rule.info());
  const Segment segment = make_segment(rule, hyper, 8);
  EXPECT_THROW(rule.offer(segment, hyper, {1, 1.0}, at::zeros({7})), c10::ValueError);
  EXPECT_THROW(rule.take(segment, hyper, {1, 1.0}, at::zeros({8}, at::kDouble)), c10::ValueError);
}

TEST(CompressedRule, ExchangesGradientsAsLongAsAnyGroupNeedsThem) {
  Hyperparameters early("OneBitAdam"), late("OneBitAdam");
  early.set("freeze_step", 2);
  late.set("freeze_step", 4);
  for (int64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(exchanged_by(one_bit_adam(), {early}, step), step > 2 ? Exchanged::signs : Exchanged::gradients) << step;
    EXPECT_EQ(exchanged_by(one_bit_adam(), {early, late}, step), step > 4 ? Exchanged::signs : Exchanged::gradients)
        << step;
  }
  EXPECT_EQ(exchanged_by(find_rule("Adam"), {Hyperparameters("Adam")}, 1000), Exchanged::gradients);
}

TEST(CompressedRule, ZeroOneAdamTakesGradientsAtIntervalsThatDouble) {
  Hyperparameters hyper("ZeroOneAdam");
  hyper.set("var_update_scaler", 2).set("var_freeze_step", 30);
  std::vector<int64_t> with_gradients;
  for (int64_t step = 1; step <= 1000; ++step) {
    if (exchanged_by(compressed("ZeroOneAdam"), {hyper}, step) == Exchanged::gradients) with_gradients.push_back(step);
  }
  // Two steps each at intervals of 1, 2, 4 and 8; the next at an interval of 16 would be the 32nd.
  EXPECT_EQ(with_gradients, (std::vector<int64_t>{1, 2, 4, 6, 8, 12, 16, 24}));
  hyper.set("var_update_scaler", 1e9);
  EXPECT_EQ(exchanged_by(compressed("ZeroOneAdam"), {hyper}, 30), Exchanged::gradients);
  EXPECT_EQ(exchanged_by(compressed("ZeroOneAdam"), {hyper}, 31), Exchanged::signs);
}

}  // namespace
}  // namespace deeptide::optim
