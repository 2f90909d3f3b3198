// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each rule against its definition in doubles, and what is particular to one of them.
#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernel_modes.h"
#include "optim/segments.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr int64_t kFewSizes[] = {0, 1, 17, 65, 1000, 65537};

/// The step in doubles, from the definition rather than from the kernel's order of operations.
Tensor adam_in_double(const Segment& s, const Hyperparameters& h, int64_t step, double gradient_scale) {
  const double lr = h.lr(), beta1 = h.get("beta1"), beta2 = h.get("beta2"), decay = h.get("weight_decay");
  const bool decoupled = h.get("decoupled_weight_decay") != 0, corrects = h.get("bias_correction") != 0;
  const Tensor p = s.master.to(at::kDouble);
  Tensor g = s.gradient.sum().to(at::kDouble) * gradient_scale;
  if (!decoupled) g = g + p * decay;
  const Tensor m = s.states[0].to(at::kDouble) * beta1 + g * (1 - beta1);
  const Tensor v = s.states[1].to(at::kDouble) * beta2 + g * g * (1 - beta2);
  const double c1 = corrects ? 1 - std::pow(beta1, step) : 1, c2 = corrects ? 1 - std::pow(beta2, step) : 1;
  const Tensor kept = decoupled ? p * (1 - lr * decay) : p;
  return kept - (m / c1) / ((v / c2).sqrt() + h.get("eps")) * lr;
}

TEST(Adam, AgreesWithItsDefinitionInDoubles) {
  at::manual_seed(1);
  const Rule& adam = find_rule("Adam");
  for (const Hyperparameters& hyper : variants_of(adam)) {
    for (const int64_t numel : kFewSizes) {
      for (const int64_t step : {1, 2, 1000}) {
        const Segment segment = make_segment(adam, hyper, numel);
        const Tensor expected = adam_in_double(segment, hyper, step, 0.5);
        adam.step(segment, hyper, {step, 0.5});
        // A dozen fp32 roundings of 6e-8 each, on the update and on the sum.
        ASSERT_TRUE(at::allclose(segment.master.to(at::kDouble), expected, 1e-6, 1e-6)) << numel;
      }
    }
  }
}

TEST(Adagrad, AgreesWithItsDefinitionInDoubles) {
  at::manual_seed(2);
  const Rule& adagrad = find_rule("Adagrad");
  for (const Hyperparameters& hyper : variants_of(adagrad)) {
    for (const int64_t numel : kFewSizes) {
      for (const int64_t step : {1, 2, 1000}) {
        const Segment segment = make_segment(adagrad, hyper, numel);
        const Tensor p = segment.master.to(at::kDouble);
        const Tensor g = segment.gradient.sum().to(at::kDouble) * 0.5 + p * hyper.get("weight_decay");
        const Tensor sum = segment.states[0].to(at::kDouble) + g * g;
        const double rate = hyper.lr() / (1 + static_cast<double>(step - 1) * hyper.get("lr_decay"));
        const Tensor expected = p - g / (sum.sqrt() + hyper.get("eps")) * rate;
        adagrad.step(segment, hyper, {step, 0.5});
        // Fewer roundings, as Adam's.
        ASSERT_TRUE(at::allclose(segment.master.to(at::kDouble), expected, 1e-6, 1e-6)) << numel;
        ASSERT_TRUE(at::allclose(segment.states[0].to(at::kDouble), sum, 1e-6, 1e-9)) << numel;
      }
    }
  }
}

/// Chen et al., algorithm 2, over fifty steps. Where the direction is a rounding error away from 0 its sign is open.
TEST(Lion, FollowsThePaperInDoubles) {
  const Rule& lion = find_rule("Lion");
  constexpr int kSteps = 50;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Hyperparameters& hyper : variants_of(lion)) {
      for (const int64_t numel : kFewSizes) {
        at::manual_seed(3);
        const double lr = hyper.lr(), beta1 = hyper.get("beta1"), beta2 = hyper.get("beta2");
        const Segment segment = make_segment(lion, hyper, numel, dtype);
        Tensor p = segment.master.to(at::kDouble), m = segment.states[0].to(at::kDouble), open = p != p;
        for (int step = 1; step <= kSteps; ++step) {
          segment.gradient.rows[0].normal_();
          lion.step(segment, hyper, {step, 0.5});
          const Tensor g = segment.gradient.rows[0].to(at::kDouble) * 0.5;
          const Tensor c = m * beta1 + g * (1 - beta1);
          // The momentum has rounded once or twice per step at 6e-8 of its terms, each decayed by beta2 since.
          open = open.logical_or(c.abs() <= 1e-5 * (m.abs() * beta1 + g.abs() * (1 - beta1) + 1e-2));
          p = p - (c.sign() + p * hyper.get("weight_decay")) * lr;
          m = m * beta2 + g * (1 - beta2);
        }
        // The parameter, at most 8, rounds twice per step at 2.4e-7; the scalars at 6e-8 of what is moved in all.
        const double tolerance = kSteps * (2 * 2.4e-7 + 1e-7);
        const Tensor apart = (segment.master.to(at::kDouble) - p).abs();
        EXPECT_EQ(at::where(open, at::zeros_like(apart), apart).gt(tolerance).sum().item<int64_t>(), 0) << numel;
        EXPECT_LE(open.sum().item<int64_t>(), numel / 50) << "too few elements are compared";
        EXPECT_TRUE(at::allclose(segment.states[0].to(at::kDouble), m, 1e-5, 1e-6)) << numel;
        if (dtype != at::kFloat) {
          EXPECT_TRUE(at::equal(segment.param, segment.master.to(dtype)));
        }
      }
    }
  }
}

/// You et al., with DeepSpeed's bounds and its correction of bias, over fifty steps.
TEST(Lamb, FollowsItsDefinitionInDoubles) {
  const auto& rule = dynamic_cast<const NormRule&>(find_rule("Lamb"));
  constexpr int kSteps = 50;
  for (const Hyperparameters& hyper : variants_of(rule)) {
    for (const int64_t numel : kFewSizes) {
      at::manual_seed(4);
      const double lr = hyper.lr(), beta1 = hyper.get("beta1"), beta2 = hyper.get("beta2"), eps = hyper.get("eps");
      const Segment segment = make_segment(rule, hyper, numel);
      Tensor p = segment.master.to(at::kDouble), m = segment.states[0].to(at::kDouble),
             v = segment.states[1].to(at::kDouble);
      for (int step = 1; step <= kSteps; ++step) {
        segment.gradient.rows[0].normal_();
        rule.step(segment, hyper, {step, 0.5});
        const Tensor g = segment.gradient.rows[0].to(at::kDouble) * 0.5;
        m = m * beta1 + g * (1 - beta1);
        v = v * beta2 + g * g * (1 - beta2);
        const Tensor root = hyper.get("eps_inside_sqrt") != 0 ? (v + eps).sqrt() : v.sqrt() + eps;
        const Tensor u = m / root + p * hyper.get("weight_decay");
        const double norm = p.norm().item<double>(), length = u.norm().item<double>();
        const double trust =
            norm > 0 && length > 0 ? std::clamp(norm / length, hyper.get("min_coeff"), hyper.get("max_coeff")) : 1.0;
        const bool corrects = hyper.get("bias_correction") != 0;
        const double rate = corrects ? lr * std::sqrt(1 - std::pow(beta2, step)) / (1 - std::pow(beta1, step)) : lr;
        p = p - u * (rate * trust);
      }
      // A step moves a weight by lr times the bound, at most; a dozen fp32 roundings of 6e-8 of it and of the weight.
      const double moved = lr * std::max(hyper.get("max_coeff"), 1.0);
      EXPECT_TRUE(at::allclose(segment.master.to(at::kDouble), p, 5e-6, kSteps * (moved * 1e-6 + 2e-7))) << numel;
      EXPECT_TRUE(at::allclose(segment.states[0].to(at::kDouble), m, 1e-5, 1e-6)) << numel;
    }
  }
}

TEST(Lamb, TakesTheRatioOfTheNormsWithinItsBounds) {
  const auto& rule = dynamic_cast<const NormRule&>(find_rule("Lamb"));
  const Hyperparameters hyper = Hyperparameters("Lamb").set("min_coeff", 0.5).set("max_coeff", 4.0);
  EXPECT_EQ(rule.ratio({9.0, 4.0}, hyper), 1.5);
  EXPECT_EQ(rule.ratio({1.0, 100.0}, hyper), 0.5);
  EXPECT_EQ(rule.ratio({100.0, 1.0}, hyper), 4.0);
  EXPECT_EQ(rule.ratio({0.0, 1.0}, hyper), 1.0);
  EXPECT_EQ(rule.ratio({1.0, 0.0}, hyper), 1.0);
}

/// The update has the singular vectors of the direction, and singular values near 1: by the polynomial's coefficients
/// they lie between 0.68 and 1.13 once five iterations have lifted those above 0.01; bf16 adds some hundredths.
TEST(Muon, OrthogonalizesAMatrixOfAnyShape) {
  at::manual_seed(5);
  const auto& rule = dynamic_cast<const MatrixRule&>(find_rule("Muon"));
  const Hyperparameters hyper("Muon");
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{32, 32}, {16, 48}, {48, 16}, {1, 64}, {64, 1}}) {
    const Tensor matrix = at::randn({rows, columns});
    const auto [u, s, vt] = at::linalg_svd(matrix, /*full_matrices=*/false);
    const Tensor update = rule.update_of(matrix.to(at::kBFloat16), hyper);
    ASSERT_EQ(update.sizes(), matrix.sizes());
    const Tensor core = at::mm(at::mm(u.t(), update.to(at::kFloat)), vt.t());
    const Tensor values = core.diagonal(), lifted = values.masked_select(s.gt(0.01 * s.norm()));
    EXPECT_GT(lifted.min().item<float>(), 0.6) << rows << "x" << columns;
    EXPECT_LT(lifted.max().item<float>(), 1.25) << rows << "x" << columns;
    // Entries off the diagonal are bf16's rounding, 2^-9 of entries below 1, a few times over.
    EXPECT_LT((core - values.diag()).abs().max().item<float>(), 0.1) << rows << "x" << columns;
  }
}

TEST(Muon, MovesAMatrixByItsOrthogonalizedMomentum) {
  at::manual_seed(6);
  const auto& rule = dynamic_cast<const MatrixRule&>(find_rule("Muon"));
  constexpr int64_t kRows = 24, kColumns = 6;
  for (const bool nesterov : {true, false}) {
    for (const bool match_rms : {true, false}) {
      Hyperparameters hyper("Muon");
      hyper.set("weight_decay", 0.1).set("momentum", 0.7).set("nesterov", nesterov).set("match_rms_adamw", match_rms);
      Segment segment = make_segment(rule, hyper, kRows * kColumns);
      segment.rows = kRows;
      const Tensor p = segment.master.to(at::kDouble), g = segment.gradient.sum().to(at::kDouble) * 0.5;
      const Tensor m = segment.states[0].to(at::kDouble) * 0.7 + g * 0.3;
      const Tensor direction = (nesterov ? g * 0.3 + m * 0.7 : m).to(at::kBFloat16).view({kRows, kColumns});
      const Tensor update = rule.update_of(direction, hyper).view({-1}).to(at::kDouble);
      rule.step(segment, hyper, {1, 0.5});
      const double factor = match_rms ? 0.2 * std::sqrt(kRows) : 2.0;  // sqrt(24 / 6)
      const Tensor expected = p * (1 - hyper.lr() * 0.1) - update * (hyper.lr() * factor);
      // The directions may differ in bf16's last bit where fp32 rounds; the updates follow by some of theirs.
      const double slack = hyper.lr() * factor * 0x1p-6;
      EXPECT_TRUE(at::allclose(segment.master.to(at::kDouble), expected, 1e-6, slack));
      EXPECT_TRUE(at::allclose(segment.states[0].to(at::kDouble), m, 1e-6, 1e-6));
    }
  }
}

TEST(Muon, LeavesTheRestToAdamW) {
  at::manual_seed(7);
  Hyperparameters muon("Muon"), adam("AdamW");
  muon.set("use_muon", 0.0);
  for (const char* name : {"lr", "beta1", "beta2", "eps", "weight_decay"}) adam.set(name, muon.get(name));
  const Segment theirs = make_segment(find_rule("AdamW"), adam, 1003, at::kBFloat16);
  Segment ours = copy_of(theirs);
  ours.states = {{}, ours.states[0], ours.states[1]};
  find_rule("AdamW").step(theirs, adam, {3, 0.5});
  find_rule("Muon").step(ours, muon, {3, 0.5});
  EXPECT_TRUE(at::equal(ours.master, theirs.master));
  EXPECT_TRUE(at::equal(ours.param, theirs.param));
  EXPECT_TRUE(at::equal(ours.states[2], theirs.states[1]));
}

TEST(Muon, TakesMatricesThatAreNeitherEmbeddingNorOutput) {
  EXPECT_TRUE(is_muon_matrix("h.0.mlp.weight", {4, 8}));
  EXPECT_TRUE(is_muon_matrix("conv.weight", {4, 8, 3, 3}));
  EXPECT_FALSE(is_muon_matrix("h.0.mlp.bias", {8}));
  EXPECT_FALSE(is_muon_matrix("scale", {}));
  EXPECT_FALSE(is_muon_matrix("model.embed_tokens.weight", {100, 8}));
  EXPECT_FALSE(is_muon_matrix("lm_head.weight", {100, 8}));
}

TEST(Lion, OnlyDecaysWhereItsDirectionIsZero) {
  const Rule& lion = find_rule("Lion");
  const Hyperparameters hyper = Hyperparameters("Lion").set("lr", 0.5).set("weight_decay", 0.5);
  const Segment segment{
      at::tensor({4.0f, 4.0f, 4.0f}), {at::tensor({0.0f, 0.0f, 0.0f})}, at::tensor({0.0f, 2.0f, -2.0f}), {}};
  lion.step(segment, hyper, {});
  EXPECT_TRUE(at::equal(segment.master, at::tensor({3.0f, 2.5f, 3.5f})));
}

TEST(Sgd, StartsItsMomentumAsTheFirstGradientWithoutDampening) {
  const Rule& sgd = find_rule("SGD");
  const Hyperparameters hyper = Hyperparameters("SGD").set("lr", 0.5).set("momentum", 0.5).set("dampening", 0.5);
  const Segment segment{at::full({37}, 4.0f), {at::full({37}, 0.0f)}, at::full({37}, 2.0f), {}};
  sgd.step(segment, hyper, {1, 1.0});
  EXPECT_TRUE(at::equal(segment.master, at::full({37}, 3.0f)));
  EXPECT_TRUE(at::equal(segment.states[0], at::full({37}, 2.0f)));
  sgd.step(segment, hyper, {2, 1.0});  // 0.5 * 2 + 0.5 * 2
  EXPECT_TRUE(at::equal(segment.states[0], at::full({37}, 2.0f)));
  EXPECT_TRUE(at::equal(segment.master, at::full({37}, 2.0f)));
}

TEST(Sgd, KeepsAMomentumThatWasSetBeforeTheFirstStep) {
  const Rule& sgd = find_rule("SGD");
  const Hyperparameters hyper = Hyperparameters("SGD").set("lr", 0.5).set("momentum", 0.5);
  const Segment segment{at::full({37}, 4.0f), {at::full({37}, 6.0f)}, at::full({37}, 2.0f), {}};
  sgd.step(segment, hyper, {1, 1.0});
  EXPECT_TRUE(at::equal(segment.states[0], at::full({37}, 5.0f)));
  EXPECT_TRUE(at::equal(segment.master, at::full({37}, 1.5f)));
}

TEST(Sgd, KeepsAMomentumOnlyIfThereIsOne) {
  const Rule& sgd = find_rule("SGD");
  Hyperparameters hyper("SGD");
  EXPECT_FALSE(sgd.keeps(0, hyper));
  const Tensor values = at::full({4}, 1.0f);
  EXPECT_THROW(sgd.step({values, {values.clone()}, values.clone(), {}}, hyper, {}), c10::ValueError);
  hyper.set("momentum", 0.9);
  EXPECT_TRUE(sgd.keeps(0, hyper));
  EXPECT_THROW(sgd.step({values, {Tensor()}, values.clone(), {}}, hyper, {}), c10::ValueError);
}

}  // namespace
}  // namespace deeptide::optim
