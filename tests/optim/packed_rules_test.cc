// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packed masters and states rounded stochastically: the bits of whole masters, and of fp32 states rounded by hand.
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "kernel_modes.h"
#include "numerics/rounding/stochastic_rounding.h"
#include "optim/rules/rule.h"
#include "optim/segments.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int64_t kPackedSizes[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 65537};

/// Those of a rule's variants that step each element by itself.
std::vector<Hyperparameters> elementwise_variants_of(const Rule& rule) {
  std::vector<Hyperparameters> variants = variants_of(rule);
  std::erase_if(variants, [&](const Hyperparameters& hyper) { return rule.reach(hyper) != Reach::elementwise; });
  return variants;
}

std::vector<const Rule*> elementwise_rules() {
  std::vector<const Rule*> rules = all_rules();
  std::erase_if(rules, [](const Rule* rule) { return elementwise_variants_of(*rule).empty(); });
  return rules;
}

class ElementwiseRule : public testing::TestWithParam<const Rule*> {
 protected:
  const Rule& rule() const { return *GetParam(); }
};

/// The segment with its master packed; `halfway` outlives it.
Segment packed(const Segment& whole, numerics::HalfwayBits& halfway) {
  Segment made = changed(whole, whole.gradient, [](const Tensor& tensor) { return tensor.clone(); });
  made.param = Tensor();
  made.low = at::zeros({whole.master.numel()}, at::kShort);
  made.halfway = &halfway;
  made.master = at::zeros({whole.master.numel()}, at::kBFloat16);
  numerics::pack(whole.master.const_data_ptr<float>(), whole.master.numel(), made.packed());
  return made;
}

Tensor unpacked(const Segment& segment) {
  const Tensor master = at::empty({segment.master.numel()});
  numerics::unpack(segment.packed(), master.numel(), master.mutable_data_ptr<float>());
  return master;
}

/// Gradients as they come: summed in fp32, or as rows of bf16, which a kernel reads by itself if there are one or two.
std::vector<numerics::Contributions> gradients_of(int64_t numel) {
  std::vector<numerics::Contributions> all{numerics::Contributions(at::randn({numel}))};
  for (const int64_t rows : {1, 2, 3}) {
    all.emplace_back((at::randn({rows, numel})).to(at::kBFloat16).unbind(0), 0.5);
  }
  return all;
}

TEST_P(ElementwiseRule, StepsAPackedMasterAsAWholeOne) {
  at::manual_seed(41);
  for (const Hyperparameters& hyper : elementwise_variants_of(rule())) {
    for (const int64_t numel : kPackedSizes) {
      numerics::HalfwayBits halfway(numel), other(numel);
      Segment whole = make_segment(rule(), hyper, numel, at::kBFloat16);
      Segment halves = packed(whole, halfway), reference = packed(whole, other), wide = copy_of(whole);
      for (const int64_t step : {1, 2, 3}) {
        for (const auto& gradient : gradients_of(numel)) {
          for (Segment* segment : {&whole, &halves}) {
            segment->gradient = gradient;
            rule().step(*segment, hyper, {step, 0.5});
          }
          for (Segment* segment : {&reference, &wide}) {
            segment->gradient = gradient;
            rule().step_reference(*segment, hyper, {step, 0.5});
          }
        }
      }
      ASSERT_TRUE(at::equal(unpacked(halves), whole.master)) << numel;
      ASSERT_TRUE(at::equal(halves.master, whole.param)) << numel;
      ASSERT_TRUE(at::equal(unpacked(reference), wide.master)) << numel;
      ASSERT_TRUE(at::equal(reference.master, wide.param)) << numel;
      for (size_t i = 0; i < whole.states.size(); ++i) {
        ASSERT_TRUE(!whole.states[i].defined() || at::equal(halves.states[i], whole.states[i])) << numel;
      }
    }
  }
}

/// The segment with states in bf16 that are rounded stochastically.
Segment stochastic(const Segment& whole, int64_t first) {
  Segment made = copy_of(whole);
  for (Tensor& state : made.states) {
    if (state.defined()) state = state.to(at::kBFloat16);
  }
  made.rounding = {.seed = 17, .first = first};
  return made;
}

/// The step is that of fp32 states with these values; what it leaves is rounded by the bits of seed, step and place.
TEST_P(ElementwiseRule, RoundsStatesInBf16ByTheirPlaceBesideAnyMaster) {
  at::manual_seed(42);
  constexpr int64_t kFirst = (int64_t{1} << 32) - 33;
  for (const Hyperparameters& hyper : elementwise_variants_of(rule())) {
    if (!rule().needs_fp32_states(hyper).empty()) continue;
    for (const int64_t numel : kPackedSizes) {
      for (const auto& gradient : gradients_of(numel)) {
        numerics::HalfwayBits halfway(numel);
        Segment beside_whole = stochastic(make_segment(rule(), hyper, numel, at::kBFloat16), kFirst);
        beside_whole.gradient = gradient;
        const Segment halves = packed(beside_whole, halfway), reference = copy_of(beside_whole);
        Segment exact = copy_of(beside_whole);
        exact.rounding.reset();
        for (Tensor& state : exact.states) state = state.defined() ? state.to(at::kFloat) : state;
        rule().step(beside_whole, hyper, {3, 0.5});
        rule().step(halves, hyper, {3, 0.5});
        rule().step(exact, hyper, {3, 0.5});
        rule().step_reference(reference, hyper, {3, 0.5});
        ASSERT_TRUE(at::equal(beside_whole.master, exact.master)) << numel;
        ASSERT_TRUE(at::equal(unpacked(halves), exact.master)) << numel;
        int stream = 0;
        for (size_t i = 0; i < exact.states.size(); ++i) {
          if (!exact.states[i].defined()) continue;
          const Tensor expected = at::empty({numel}, at::kBFloat16);
          numerics::round_stochastically(exact.states[i].const_data_ptr<float>(), numel,
                                         static_cast<uint16_t*>(expected.mutable_data_ptr()),
                                         numerics::RandomKey::of(17, 3), stream++, kFirst);
          ASSERT_TRUE(at::equal(beside_whole.states[i], expected)) << numel << " state " << i;
          ASSERT_TRUE(at::equal(halves.states[i], expected)) << numel << " state " << i;
          // If the reference's last fp32 bit differs, the neighbour may: half as much again is RMSprop's momentum.
          ASSERT_TRUE(at::allclose(reference.states[i], expected, 0x1p-7, 1e-5)) << numel << " state " << i;
        }
      }
    }
  }
}

TEST_P(ElementwiseRule, IsBitEqualHoweverAPackedShardWithRoundedStatesIsCut) {
  at::manual_seed(43);
  constexpr int64_t kNumel = 70001;
  const Hyperparameters hyper = elementwise_variants_of(rule()).front();
  numerics::HalfwayBits halfway(kNumel), other(kNumel);
  const Segment start = stochastic(make_segment(rule(), hyper, kNumel, at::kBFloat16), 5);
  const Segment whole = packed(start, halfway), cut = packed(start, other);
  rule().step(whole, hyper, {3, 0.25});
  step_in_pieces(rule(), cut, {0, 1, 17, 5000, 5016, 40001, kNumel}, hyper, {3, 0.25});
  EXPECT_TRUE(same_bits(whole, cut));
  EXPECT_TRUE(at::equal(unpacked(whole), unpacked(cut)));
}

TEST_P(ElementwiseRule, RefusesHalvesAndRoundingThatDoNotFit) {
  const Hyperparameters hyper = elementwise_variants_of(rule()).front();
  const auto rejects = [&](const Segment& segment, const std::string& words) {
    expect_rejected(rule(), segment, hyper, words);
  };
  numerics::HalfwayBits halfway(8);
  const Segment whole = make_segment(rule(), hyper, 8, at::kBFloat16), halves = packed(whole, halfway);
  Segment spoilt = halves;
  spoilt.low = spoilt.low.to(at::kInt);
  rejects(spoilt, "low is Int, expected Short");
  spoilt.low = at::zeros({7}, at::kShort);
  rejects(spoilt, "low has shape [7]");
  spoilt = halves;
  spoilt.halfway = nullptr;
  rejects(spoilt, "needs the bits of what lies halfway");
  spoilt = packed(whole, halfway);
  spoilt.master = spoilt.master.to(at::kFloat);
  rejects(spoilt, "low is defined beside a master of Float");
  if (!rule().keeps(0, hyper)) return;
  spoilt = packed(whole, halfway);
  spoilt.states[0] = spoilt.states[0].to(at::kBFloat16);
  rejects(spoilt, rule().roles()[0].name + " is BFloat16, expected Float");
}

TEST(Lamb, TakesNoPackedMaster) {
  const Rule& rule = find_rule("Lamb");
  const Hyperparameters hyper("Lamb");
  numerics::HalfwayBits halfway(8);
  try {
    rule.step(packed(make_segment(rule, hyper, 8), halfway), hyper, {});
    ADD_FAILURE() << "accepted";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("master is BFloat16, expected Float"), std::string::npos) << error.what();
  }
}

TEST(Rmsprop, RefusesRoundedStatesWhereItSubtractsThem) {
  const Rule& rule = find_rule("RMSprop");
  const Hyperparameters hyper = Hyperparameters("RMSprop").set("centered", 1);
  try {
    rule.step(stochastic(make_segment(rule, hyper, 8), 0), hyper, {});
    ADD_FAILURE() << "accepted";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("square_avg - grad_avg^2"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, ElementwiseRule, testing::ValuesIn(elementwise_rules()),
                         [](const auto& info) { return info.param->name(); });

}  // namespace
}  // namespace deeptide::optim
