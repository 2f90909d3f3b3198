// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks every rule: it agrees with its reference and with the table, and with itself however work is cut.
#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "deeptide/errors.h"
#include "kernel_modes.h"
#include "optim/compressed/compressed_rule.h"
#include "optim/rules/rule.h"
#include "optim/segments.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 65537};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

TEST(Rules, AreThoseOfTheConfigurationsTable) {
  std::vector<std::string> wanted, registered = registered_names(), found;
  for (const OptimizerInfo& info : optimizers()) wanted.push_back(info.name);
  for (const Rule* rule : all_rules()) found.push_back(rule->name());
  EXPECT_EQ(found, wanted) << "an optimizer of the table has no rule";
  std::sort(wanted.begin(), wanted.end());
  std::sort(registered.begin(), registered.end());
  EXPECT_EQ(registered, wanted) << "a rule is in no row of the table, or the table's row is marked later";
  for (const OptimizerInfo& info : optimizers()) {
    for (const std::string& type : info.types) EXPECT_EQ(&find_rule(type).info(), &info) << type;
  }
  EXPECT_EQ(&find_rule("adamw"), &find_rule("Adam"));
}

TEST(Rules, AreRefusedByNameIfThereIsNone) {
  std::string types;
  for (const OptimizerInfo& info : optimizers()) {
    for (const std::string& type : info.types) types += (types.empty() ? "" : ", ") + type;
  }
  EXPECT_NE(types.find("AdamW, SGD"), std::string::npos);
  try {
    find_rule("MuAdam");
    ADD_FAILURE() << "found";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), "optimizer: got \"MuAdam\", expected one of " + types);
  }
}

/// How far two steps may differ: directions that differ in fp32's last bit may differ in bf16's, and a matrix's update
/// follows them.
double bf16_slack(const Rule& rule, const Hyperparameters& hyper, int64_t numel) {
  if (rule.reach(hyper) != Reach::whole_parameter) return 0.0;
  const double factor = hyper.get("match_rms_adamw") != 0.0 ? 0.2 * std::sqrt(static_cast<double>(numel)) : 1.0;
  return hyper.lr() * factor * 0x1p-6;
}

class EveryRule : public testing::TestWithParam<const Rule*> {
 protected:
  const Rule& rule() const { return *GetParam(); }
  Hyperparameters defaults() const { return Hyperparameters(rule().info()); }
  /// The last of its variants that keeps all states.
  Hyperparameters full() const {
    Hyperparameters chosen = defaults();
    for (const Hyperparameters& hyper : variants_of(rule())) {
      bool keeps_all = true;
      for (size_t role = 0; role < rule().roles().size(); ++role) keeps_all = keeps_all && rule().keeps(role, hyper);
      if (keeps_all) chosen = hyper;
    }
    return chosen;
  }
};

TEST_P(EveryRule, ReadsEachHyperparameterOfItsRowInTheTable) {
  std::set<std::string> named;
  for (const HyperparameterInfo& info : rule().info().hyperparameters) named.insert(info.name);
  EXPECT_EQ(rule().names_read(), named);
  EXPECT_TRUE(named.contains("lr")) << "schedules set it";
  EXPECT_FALSE(variants_of(rule()).empty()) << "tests/optim/segments.h has no hyper-parameters to try it with";
}

TEST_P(EveryRule, AgreesWithItsReferenceOverThreeSteps) {
  at::manual_seed(1);
  for (const Hyperparameters& hyper : variants_of(rule())) {
    for (const int64_t numel : kSizes) {
      Segment kernel = make_segment(rule(), hyper, numel, at::kBFloat16), reference = copy_of(kernel);
      for (const int64_t step : {1, 2, 1000}) {
        kernel.gradient.rows[0].normal_();
        rule().step(kernel, hyper, {step, 0.5});
        rule().step_reference(reference, hyper, {step, 0.5});
      }
      const auto got = written(kernel), expected = written(reference);
      for (size_t i = 0; i + 1 < got.size(); ++i) {
        // Thrice a dozen fp32 roundings of 6e-8 of values up to 2; the reference does not fuse its multiply-adds.
        double slack = i == 0 ? 3 * bf16_slack(rule(), hyper, numel) : 0.0;
        // RMSprop's momentum adds normalized gradients, of up to 10, in each step.
        if (i > 0 && rule().name() == "RMSprop") slack = 5e-6;
        ASSERT_TRUE(at::allclose(got[i], expected[i], 2e-6, 5e-7 + slack)) << numel << " tensor " << i;
      }
      ASSERT_TRUE(at::equal(kernel.param, kernel.master.to(at::kBFloat16))) << numel;
    }
  }
}

/// The gradient's rows are summed as they are read: the same bits as from the sum that `ordered_sum` writes.
TEST_P(EveryRule, SumsTheRowsOfItsGradientAsTheOrderedSumDoes) {
  at::manual_seed(21);
  const Hyperparameters hyper = full();
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t world : {1, 2, 3, 70}) {
      for (const int64_t numel : kSizes) {
        const auto rows = (at::randn({world, numel + 3}) * 3).to(dtype).narrow(1, 1, numel).unbind(0);
        const numerics::Contributions apart(rows, 0.3);
        Tensor sum = at::empty({numel}), squares = at::empty({1}, at::kDouble), alone = at::empty({1}, at::kDouble);
        numerics::ordered_sum(rows, 0.3, /*overwrite=*/true, sum, squares);
        numerics::ordered_squares(apart, alone);
        ASSERT_EQ(squares.item<double>(), alone.item<double>()) << dtype << " " << world << "x" << numel;
        for (const at::ScalarType param : {at::kFloat, at::kBFloat16}) {
          Segment direct = make_segment(rule(), hyper, numel, param), summed = copy_of(direct);
          direct.gradient = apart;
          summed.gradient = {sum};
          rule().step(direct, hyper, {2, 0.5});
          rule().step(summed, hyper, {2, 0.5});
          ASSERT_TRUE(same_bits(direct, summed)) << dtype << " " << world << "x" << numel;
        }
      }
    }
  }
}

TEST_P(EveryRule, WritesLargeParametersPastTheCacheAsItWritesSmallOnes) {
  at::manual_seed(22);
  constexpr int64_t kNumel = (1 << 20) + 4099;
  for (const int64_t offset : {0, 3}) {  // what is not aligned goes through the cache
    const Segment segment = make_segment(rule(), defaults(), kNumel, at::kBFloat16, offset);
    rule().step(segment, defaults(), {});
    EXPECT_TRUE(at::equal(segment.param, segment.master.to(at::kBFloat16)));
  }
}

TEST_P(EveryRule, IsBitEqualHoweverTheShardIsCut) {
  at::manual_seed(2);
  std::mt19937 random(3);
  constexpr int64_t kNumel = 70001;
  for (const Hyperparameters& hyper : variants_of(rule())) {
    for (const at::ScalarType dtype : kDtypes) {
      const Segment whole = make_segment(rule(), hyper, kNumel, dtype), cut = copy_of(whole), halves = copy_of(whole);
      rule().step(whole, hyper, {3, 0.25});
      std::vector<int64_t> cuts{0};
      while (cuts.back() < kNumel) {
        cuts.push_back(std::min(kNumel, cuts.back() + std::uniform_int_distribution<int64_t>(1, 2000)(random)));
      }
      step_in_pieces(rule(), cut, cuts, hyper, {3, 0.25});
      step_in_pieces(rule(), halves, {0, kNumel / 2, kNumel}, hyper, {3, 0.25});
      ASSERT_TRUE(same_bits(whole, cut)) << dtype;
      ASSERT_TRUE(same_bits(whole, halves)) << dtype;
    }
  }
}

TEST_P(EveryRule, IsBitEqualAtAnyAlignmentAndLeavesNeighboursAlone) {
  at::manual_seed(4);
  const Hyperparameters hyper = full();
  for (const int64_t numel : kSizes) {
    for (const int64_t offset : {1, 3, 5, 13}) {
      const Segment aligned = make_segment(rule(), hyper, numel, at::kBFloat16);
      const Segment odd = changed(aligned, shifted(aligned.gradient.sum(), offset),
                                  [&](const Tensor& tensor) { return shifted(tensor, offset); });
      rule().step(aligned, hyper, {});
      rule().step(odd, hyper, {});
      ASSERT_TRUE(same_bits(aligned, odd)) << numel << " at " << offset;
      for (const Tensor& view : written(odd)) {
        const Tensor storage = view.as_strided({numel + offset + 3}, {1}, 0);
        ASSERT_EQ(storage.narrow(0, 0, offset).count_nonzero().item<int64_t>(), 0);
        ASSERT_EQ(storage.narrow(0, offset + numel, 3).count_nonzero().item<int64_t>(), 0);
      }
    }
  }
}

TEST_P(EveryRule, IsBitEqualForOneAndTwoThreads) {
  if (rule().reach(full()) == Reach::whole_parameter) GTEST_SKIP() << "torch multiplies the matrices";
  at::manual_seed(5);
  const Segment one = make_segment(rule(), full(), 300007, at::kBFloat16), two = copy_of(one);
  {
    Threads threads(1);
    rule().step(one, full(), {});
  }
  Threads threads(2);
  rule().step(two, full(), {});
  EXPECT_TRUE(same_bits(one, two));
}

TEST_P(EveryRule, AgreesOnEveryInstructionSetOfThisMachine) {
  at::manual_seed(6);
  const Hyperparameters hyper = full();
  const Segment start = make_segment(rule(), hyper, 1003, at::kBFloat16), expected = copy_of(start);
  rule().step(expected, hyper, {});
  for (const int64_t target : {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}}) {
    if (target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
    const Segment got = copy_of(start);
    {
      Target chosen(target);
      if (target != HWY_SCALAR) {
        EXPECT_STREQ(kernel_target(), hwy::TargetName(target));
      }
      rule().step(got, hyper, {});
    }
    const double slack = bf16_slack(rule(), hyper, 1003);
    ASSERT_TRUE(at::allclose(got.master, expected.master, 5e-7, 1e-7 + slack)) << hwy::TargetName(target);
    ASSERT_TRUE(at::equal(got.param, got.master.to(at::kBFloat16))) << hwy::TargetName(target);
  }
}

TEST_P(EveryRule, CarriesNaNOfAGradientAsFarAsItReaches) {
  const Hyperparameters hyper = full();
  const Segment segment = make_segment(rule(), hyper, 37, at::kBFloat16);
  segment.gradient.rows[0][19] = std::numeric_limits<float>::quiet_NaN();
  rule().step(segment, hyper, {2, 1.0});
  for (const Tensor& tensor : written(segment)) {
    const bool is_state = std::any_of(segment.states.begin(), segment.states.end(),
                                      [&](const Tensor& state) { return state.is_same(tensor); });
    const bool whole = rule().reach(hyper) != Reach::elementwise && !is_state;
    // 1-bit LAMB's third state moves in steps by signs only.
    const bool rests = dynamic_cast<const CompressedNormRule*>(&rule()) && tensor.is_same(segment.states.back());
    EXPECT_EQ(tensor[19].isnan().item<bool>(), !rests);
    EXPECT_EQ(tensor.isnan().sum().item<int64_t>(), rests ? 0 : whole ? 37 : 1);
  }
}

TEST_P(EveryRule, RejectsTensorsThatDoNotFit) {
  const Hyperparameters hyper = full();
  const std::string state = rule().roles()[0].name;
  const auto rejects = [&](auto spoil, const std::string& word) {
    Segment segment = make_segment(rule(), hyper, 8, at::kBFloat16);
    spoil(segment);
    expect_rejected(rule(), segment, hyper, word);
  };
  rejects([](Segment& s) { s.master = Tensor(); }, "master");
  rejects([](Segment& s) { s.master = s.master.to(at::kDouble); }, "master is Double");
  rejects([](Segment& s) { s.gradient = {at::zeros({7})}; }, "gradient has shape [7]");
  rejects([](Segment& s) { s.states[0] = s.states[0].to(at::kBFloat16); }, state + " is BFloat16");
  rejects([](Segment& s) { s.states[0] = at::zeros({16}).slice(0, 0, 16, 2); }, state + " is not contiguous");
  rejects([](Segment& s) { s.states[0] = Tensor(); }, state + " is undefined");
  rejects([](Segment& s) { s.states[0] = at::zeros({5}); }, state + " has shape [5]");
  rejects([](Segment& s) { s.states.pop_back(); }, "states, expected");
  rejects([](Segment& s) { s.gradient = {at::empty({8}, at::TensorOptions(at::kMeta))}; }, "gradient is on meta");
  rejects([](Segment& s) { s.param = at::zeros({8}); }, "param is Float");
  const Segment segment = make_segment(rule(), hyper, 8);
  EXPECT_THROW(rule().step(segment, hyper, {0, 1.0}), c10::ValueError);
  const char* other = rule().name() == "SGD" ? "Adam" : "SGD";
  EXPECT_THROW(rule().step(segment, Hyperparameters(other), {}), c10::ValueError);
}

TEST_P(EveryRule, RejectsRowsThatDoNotDivideTheParameter) {
  Segment segment = make_segment(rule(), full(), 8);
  segment.rows = 3;
  EXPECT_THROW(rule().step(segment, full(), {}), c10::ValueError);
}

/// The segment as it is when its parameters are their own masters, and states have `states`' type.
Segment rounded(const Segment& wide, at::ScalarType dtype, at::ScalarType states) {
  Segment made{wide.master.to(dtype), {}, wide.gradient, {}};
  for (const Tensor& state : wide.states) made.states.push_back(state.defined() ? state.to(states) : state);
  return made;
}

TEST_P(EveryRule, StepsAMasterOf16BitsInFp32AndRoundsItOnce) {
  at::manual_seed(31);
  for (const Hyperparameters& hyper : variants_of(rule())) {
    if (rule().reach(hyper) != Reach::elementwise) continue;
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      for (const at::ScalarType states : {at::kFloat, dtype}) {
        for (const int64_t numel : kSizes) {
          const Segment own = rounded(make_segment(rule(), hyper, numel), dtype, states), reference = copy_of(own);
          Segment wide = changed(own, own.gradient, [](const Tensor& tensor) { return tensor.to(at::kFloat).clone(); });
          wide.param = at::zeros({numel}, dtype);
          rule().step(own, hyper, {3, 0.5});
          rule().step(wide, hyper, {3, 0.5});
          ASSERT_TRUE(at::equal(own.master, wide.param)) << dtype << " " << numel;
          rule().step_reference(reference, hyper, {3, 0.5});
          ASSERT_EQ(reference.master.scalar_type(), dtype);
          const double ulp = dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
          ASSERT_TRUE(at::allclose(own.master, reference.master, ulp, 1e-6)) << dtype << " " << numel;
          for (size_t i = 0; i < own.states.size(); ++i) {
            if (!own.states[i].defined()) continue;
            ASSERT_TRUE(at::equal(own.states[i], wide.states[i].to(states))) << dtype << " " << numel;
            ASSERT_TRUE(at::allclose(own.states[i], reference.states[i], ulp, 1e-6)) << dtype << " " << numel;
          }
        }
      }
    }
  }
}

TEST_P(EveryRule, TakesAMasterOf16BitsOnlyIfItIsElementwiseAndTheParameterItself) {
  const Hyperparameters hyper = full();
  const auto rejects = [&](const Segment& segment, const std::string& words) {
    expect_rejected(rule(), segment, hyper, words);
  };
  Segment segment = rounded(make_segment(rule(), hyper, 8), at::kHalf, at::kFloat);
  if (rule().reach(hyper) != Reach::elementwise) return rejects(segment, "master is Half, expected Float");
  segment.param = segment.master;
  rejects(segment, "param is defined beside a master of 16 bits");
  rejects(rounded(segment, at::kHalf, at::kBFloat16), "is BFloat16, expected Float");
}

INSTANTIATE_TEST_SUITE_P(Optimizers, EveryRule, testing::ValuesIn(all_rules()),
                         [](const auto& info) { return info.param->name(); });

/// Runs a step that leaves `values` as they are, so that `param` gets exactly their rounding.
Tensor rounded_by_kernel(const Tensor& values, at::ScalarType dtype) {
  const Segment segment{values.clone(), {Tensor()}, at::zeros_like(values), at::zeros({values.numel()}, dtype)};
  find_rule("SGD").step(segment, Hyperparameters("SGD").set("lr", 0.0), {});
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

}  // namespace
}  // namespace deeptide::optim
