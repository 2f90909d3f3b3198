// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// 1-bit LAMB: LAMB without bias correction, then a second moment that stays, ratios that follow from the ones averaged
// until then, and signs of momenta in the place of gradients.
//
// With gradients: as LAMB; where the ratio is not 1, c = bc*c+(1-bc)*ratio, from 0.
// By signs: m = mean over ranks, from signs, of m+(1-b1)(own g - m); v stays. g = (m - b1*old m)/(1-b1) is what the
// mean gradient must have been; w = b2*w+(1-b2)g*g, from v. f = max over the parameter of (sqrt(v)+eps)/(sqrt(w)+eps),
// drawn towards 1 by the share of the decay in u = m/(sqrt(v)+eps) + wd*p: f = r*f+1-r, r = min(1,
// |m/(sqrt(v)+eps)|/|u|). Then f is bounded by [factor_min, factor_max] and by [1-threshold, 1+threshold] times the
// last one; p -= lr*c*f*u. DeepSpeed scales momenta so that one scale may serve all parameters; here each piece has a
// scale of its own. Source: Li et al. arXiv:2104.06069; DeepSpeed's runtime/fp16/onebit/lamb.py.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "optim/compressed/compressed_rule.h"
#include "optim/rules/elementwise.h"
#include "optim/rules/lamb.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/compressed/one_bit_lamb.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

#ifndef DEEPTIDE_OPTIM_ONE_BIT_LAMB_ONCE
#define DEEPTIDE_OPTIM_ONE_BIT_LAMB_ONCE
namespace deeptide::optim {

struct OneBitLambScalars {
  float first_keep;     // beta1
  float first_inverse;  // 1 / (1 - beta1)
  float second_keep;    // beta2
  float second_weight;  // 1 - beta2
  float eps;
  float decay;
  bool starts;  // the first step by signs: the moving second moment begins as the frozen one
};

}  // namespace deeptide::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

HWY_INLINE float largest(const float* values, size_t count) {
  const D d;
  V most = hn::Zero(d);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) most = hn::Max(most, hn::LoadU(d, values + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, most));
  for (; i < count; ++i) result = std::max(result, values[i]);
  return result;
}

/// States: m, v, w. Writes the direction and the update; returns the largest factor.
float one_bit_lamb_take(const Streams& io, const float* mean, size_t count, const OneBitLambScalars& s,
                        float* direction, float* update, float* factors) {
  const D d;
  each_vector(0, count, [=](auto part, size_t i) {
    const V m = part.get(mean + i), v = part.get(io.states[1] + i), eps = hn::Set(d, s.eps);
    const V moved = hn::NegMulAdd(hn::Set(d, s.first_keep), part.get(io.states[0] + i), m);
    const V g = hn::Mul(moved, hn::Set(d, s.first_inverse));
    V w = part.get(io.states[s.starts ? 1 : 2] + i);
    w = hn::MulAdd(hn::Mul(g, hn::Set(d, s.second_weight)), g, hn::Mul(w, hn::Set(d, s.second_keep)));
    const V root = hn::IfThenElse(hn::Eq(v, hn::Zero(d)), hn::Abs(m), hn::Sqrt(v));  // v is 0 where nothing came before
    const V frozen = hn::Add(root, eps), moving = hn::Add(hn::Sqrt(w), eps);
    const V towards = hn::Div(m, frozen);
    part.put(m, io.states[0] + i);
    part.put(w, io.states[2] + i);
    part.put(hn::Div(frozen, moving), factors + i);
    part.put(towards, direction + i);
    part.put(hn::MulAdd(hn::Set(d, s.decay), part.get(io.master + i), towards), update + i);
  });
  return largest(factors, count);
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(one_bit_lamb_take);

/// A parameter's numbers: the mean ratio, the last factor, and whether the last step was by signs.
constexpr size_t kCoefficient = 0, kFactor = 1, kFrozen = 2;

class OneBitLamb final : public CompressedNormRule {
 public:
  explicit OneBitLamb(const OptimizerInfo& info)
      : Rule(info, {{"exp_avg"}, {"exp_avg_sq"}, {"exp_avg_sq_fresh"}}, Reach::parameter_norms) {}

  std::vector<double> parameter_numbers() const override { return {0.0, 1.0, 0.0}; }

  Exchanged exchanged(const Hyperparameters& hyper, int64_t step) const override {
    return static_cast<double>(step) > hyper[freeze_step_] ? Exchanged::signs : Exchanged::gradients;
  }

  double ratio(const NormSquares& whole, const Hyperparameters& hyper) const override {
    return detail::lamb_ratio(whole, hyper[min_coeff_], hyper[max_coeff_]);
  }
  std::optional<LambScalars> kernel_scalars(const Hyperparameters& hyper, const StepTerms& terms,
                                            double ratio) const override {
    return detail::lamb_scalars(lamb(hyper), terms, ratio);
  }

  double next_ratio(const NormSquares& whole, const Hyperparameters& hyper, std::span<double> numbers) const override {
    const double now = ratio(whole, hyper), keep = hyper[coeff_beta_];
    if (now != 1.0) numbers[kCoefficient] = keep * numbers[kCoefficient] + (1.0 - keep) * now;
    numbers[kFactor] = 1.0;
    numbers[kFrozen] = 0.0;
    return now;
  }

  /// A parameter whose ratio was 1 throughout keeps 1.
  double taken_ratio(const TakenTotals& whole, const Hyperparameters& hyper, std::span<double> numbers) const override {
    double factor = whole.factor;
    const double update = std::sqrt(whole.update);
    if (hyper[weight_decay_] > 0.0 && update > 0.0) {
      const double share = std::min(1.0, std::sqrt(whole.direction) / update);
      factor = factor * share + (1.0 - share);
    }
    const double last = numbers[kFactor], threshold = hyper[factor_threshold_];
    factor = std::min(std::max(factor, hyper[factor_min_]), hyper[factor_max_]);
    factor = std::min(std::max(factor, last * (1.0 - threshold)), last * (1.0 + threshold));
    numbers[kFactor] = factor;
    numbers[kFrozen] = 1.0;
    return (numbers[kCoefficient] == 0.0 ? 1.0 : numbers[kCoefficient]) * factor;
  }

 private:
  LambNumbers lamb(const Hyperparameters& hyper) const {
    return {.lr = hyper[lr_],
            .beta1 = hyper[beta1_],
            .beta2 = hyper[beta2_],
            .eps = hyper[eps_],
            .weight_decay = hyper[weight_decay_],
            .bias_correction = false,
            .mean_where_unreached = true};
  }

  OneBitLambScalars scalars(const Hyperparameters& hyper, std::span<const double> numbers) const {
    const double beta1 = hyper[beta1_], beta2 = hyper[beta2_];
    return {.first_keep = static_cast<float>(beta1),
            .first_inverse = static_cast<float>(1.0 / (1.0 - beta1)),
            .second_keep = static_cast<float>(beta2),
            .second_weight = static_cast<float>(1.0 - beta2),
            .eps = static_cast<float>(hyper[eps_]),
            .decay = static_cast<float>(hyper[weight_decay_]),
            .starts = numbers[kFrozen] == 0.0};
  }

  float momentum_weight(const Hyperparameters& hyper) const override { return static_cast<float>(1.0 - hyper[beta1_]); }

  void measure_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                   NormSums& sums) const override {
    detail::lamb_measure_cpu(segment, lamb(hyper), terms, first, sums);
  }
  void measure_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                    NormSums& sums) const override {
    detail::lamb_measure_aten(segment, lamb(hyper), terms, first, sums);
  }
  void apply_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                 double ratio) const override {
    detail::lamb_apply_cpu(segment, lamb(hyper), terms, ratio);
  }
  void apply_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                  double ratio) const override {
    detail::lamb_apply_aten(segment, lamb(hyper), terms, ratio);
  }

  void take_states_cpu(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                       const Tensor& mean, int64_t first, TakenSums& sums) const override {
    const OneBitLambScalars s = scalars(hyper, numbers);
    Segment own = segment;
    own.gradient = mean;
    detail::over_blocks(own, first, [&](int64_t begin, int64_t count, const float* values) {
      constexpr int64_t kBlock = numerics::SumReader::kBlock;
      HWY_ALIGN float direction[kBlock];
      HWY_ALIGN float update[kBlock];
      HWY_ALIGN float factors[kBlock];
      const detail::Streams io = detail::streams_from(segment, begin);
      sums.note_factor(HWY_DYNAMIC_DISPATCH(one_bit_lamb_take)(io, values, static_cast<size_t>(count), s, direction,
                                                               update, factors));
      sums.direction.add(first + begin, direction, count);
      sums.update.add(first + begin, update, count);
    });
  }

  void take_states_aten(const Segment& segment, const Hyperparameters& hyper, std::span<const double> numbers,
                        const Tensor& mean, int64_t first, TakenSums& sums) const override {
    const OneBitLambScalars s = scalars(hyper, numbers);
    const Tensor &m = segment.states[0], &v = segment.states[1], &w = segment.states[2];
    const Tensor g = mean.sub(m, s.first_keep).mul_(s.first_inverse);
    if (s.starts) w.copy_(v);
    w.mul_(s.second_keep).addcmul_(g, g, s.second_weight);
    m.copy_(mean);
    const Tensor root = mean.abs().where(v.eq(0), v.sqrt());
    const Tensor frozen = root.add(s.eps), moving = w.sqrt().add_(s.eps);
    sums.note_factor(frozen.div(moving).max().item<float>());
    const Tensor direction = m.div(frozen);
    sums.direction.add(first, direction);
    sums.update.add(first, direction.add(segment.master, s.decay));
  }

  const size_t lr_ = index_of("lr"), beta1_ = index_of("beta1"), beta2_ = index_of("beta2"), eps_ = index_of("eps"),
               weight_decay_ = index_of("weight_decay"), max_coeff_ = index_of("max_coeff"),
               min_coeff_ = index_of("min_coeff"), freeze_step_ = index_of("freeze_step"),
               coeff_beta_ = index_of("coeff_beta"), factor_max_ = index_of("factor_max"),
               factor_min_ = index_of("factor_min"), factor_threshold_ = index_of("factor_threshold");
};

const Registration kOneBitLamb("OneBitLamb", &make_rule<OneBitLamb>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
