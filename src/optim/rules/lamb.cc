// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// LAMB: Adam's direction, scaled per parameter by the ratio of its norm to the direction's.
//
// m = m+(1-b1)(g-m); v = b2*v+(1-b2)g*g; u = m/(sqrt(v)+eps) + wd*p, or m/sqrt(v+eps); ratio = |p|/|u| within
// [min_coeff, max_coeff], 1 where either norm is 0; p -= lr*sqrt(1-b2^t)/(1-b1^t) * ratio * u. As in DeepSpeed, bias is
// corrected in the learning rate alone. Bytes moved per element: 24 in the first pass, 16 in the second, 2 more with a
// 16-bit parameter; u is computed twice and never stored. Source: You et al. arXiv:1904.00962.
#include "optim/rules/lamb.h"

#include <ATen/core/Tensor.h>

#include <cmath>

#include "optim/rules/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/lamb.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

#include "optim/updates/lamb_update.inl"

void lamb_measure(const Streams& io, const float* gradient, size_t count, const LambScalars& s, float* update) {
  each_vector(0, count, [=](auto part, size_t i) {
    for (const float* stream : {io.master, io.states[0], io.states[1]}) fetch_ahead(stream + i);
    V m = part.get(io.states[0] + i), v = part.get(io.states[1] + i);
    const V own = lamb_measured(part.get(io.master + i), part.get(gradient + i), m, v, s);
    part.put(m, io.states[0] + i);
    part.put(v, io.states[1] + i);
    part.put(own, update + i);
  });
}

void lamb_apply(const Streams& io, size_t count, const LambScalars& s) {
  move_master(io, count, [io, s](auto part, size_t i) {
    for (const float* stream : {io.master, io.states[0], io.states[1]}) fetch_ahead(stream + i);
    return lamb_moved(part.get(io.master + i), part.get(io.states[0] + i), part.get(io.states[1] + i), s);
  });
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(lamb_measure);
HWY_EXPORT(lamb_apply);

Tensor update_aten(const Segment& segment, const LambScalars& s) {
  const Tensor exp_avg = segment.states[0], exp_avg_sq = segment.states[1];
  Tensor denominator = s.eps_inside_sqrt ? exp_avg_sq.add(s.eps).sqrt_() : exp_avg_sq.sqrt().add_(s.eps);
  if (s.mean_where_unreached) denominator = exp_avg.abs().add_(s.eps).where(exp_avg_sq.eq(0), denominator);
  return exp_avg.div(denominator).add_(segment.master, s.decay);
}

class Lamb final : public NormRule {
 public:
  explicit Lamb(const OptimizerInfo& info) : Rule(info, {{"exp_avg"}, {"exp_avg_sq"}}, Reach::parameter_norms) {}

  double ratio(const NormSquares& whole, const Hyperparameters& hyper) const override {
    return detail::lamb_ratio(whole, hyper[min_coeff_], hyper[max_coeff_]);
  }
  std::optional<LambScalars> kernel_scalars(const Hyperparameters& hyper, const StepTerms& terms,
                                            double ratio) const override {
    return detail::lamb_scalars(numbers(hyper), terms, ratio);
  }

 private:
  LambNumbers numbers(const Hyperparameters& hyper) const {
    return {.lr = hyper[lr_],
            .beta1 = hyper[beta1_],
            .beta2 = hyper[beta2_],
            .eps = hyper[eps_],
            .weight_decay = hyper[weight_decay_],
            .eps_inside_sqrt = hyper[eps_inside_sqrt_] != 0.0,
            .bias_correction = hyper[bias_correction_] != 0.0};
  }

  void measure_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                   NormSums& sums) const override {
    detail::lamb_measure_cpu(segment, numbers(hyper), terms, first, sums);
  }
  void apply_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                 double ratio) const override {
    detail::lamb_apply_cpu(segment, numbers(hyper), terms, ratio);
  }
  void measure_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                    NormSums& sums) const override {
    detail::lamb_measure_aten(segment, numbers(hyper), terms, first, sums);
  }
  void apply_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                  double ratio) const override {
    detail::lamb_apply_aten(segment, numbers(hyper), terms, ratio);
  }

  const size_t lr_ = index_of("lr"), bias_correction_ = index_of("bias_correction"), beta1_ = index_of("beta1"),
               beta2_ = index_of("beta2"), eps_ = index_of("eps"), eps_inside_sqrt_ = index_of("eps_inside_sqrt"),
               weight_decay_ = index_of("weight_decay"), max_coeff_ = index_of("max_coeff"),
               min_coeff_ = index_of("min_coeff");
};

const Registration kLamb("Lamb", &make_rule<Lamb>);

}  // namespace

namespace detail {

LambScalars lamb_scalars(const LambNumbers& numbers, const StepTerms& terms, double ratio) {
  const auto t = static_cast<double>(terms.step);
  const double beta1 = numbers.beta1, beta2 = numbers.beta2;
  const double correction =
      numbers.bias_correction ? std::sqrt(1.0 - std::pow(beta2, t)) / (1.0 - std::pow(beta1, t)) : 1.0;
  return {
      .first_weight = static_cast<float>(1.0 - beta1),
      .second_weight = static_cast<float>(1.0 - beta2),
      .second_keep = static_cast<float>(beta2),
      .eps = static_cast<float>(numbers.eps),
      .decay = static_cast<float>(numbers.weight_decay),
      .step_size = static_cast<float>(numbers.lr * correction * ratio),
      .gradient_scale = static_cast<float>(terms.gradient_scale),
      .eps_inside_sqrt = numbers.eps_inside_sqrt,
      .mean_where_unreached = numbers.mean_where_unreached,
  };
}

void lamb_measure_cpu(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, int64_t first,
                      NormSums& sums) {
  const LambScalars s = lamb_scalars(numbers, terms, 1.0);
  over_blocks(segment, first, [&](int64_t begin, int64_t count, const float* gradient) {
    HWY_ALIGN float update[numerics::SumReader::kBlock];
    const Streams io = streams_from(segment, begin);
    HWY_DYNAMIC_DISPATCH(lamb_measure)(io, gradient, static_cast<size_t>(count), s, update);
    sums.param.add(first + begin, io.master, count);
    sums.update.add(first + begin, update, count);
  });
}

void lamb_measure_aten(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, int64_t first,
                       NormSums& sums) {
  const LambScalars s = lamb_scalars(numbers, terms, 1.0);
  const Tensor gradient = scaled_gradient(segment, terms, /*l2_decay=*/0.0f);
  segment.states[0].lerp_(gradient, s.first_weight);
  segment.states[1].mul_(s.second_keep).addcmul_(gradient, gradient, s.second_weight);
  sums.param.add(first, segment.master);
  sums.update.add(first, update_aten(segment, s));
}

void lamb_apply_cpu(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, double ratio) {
  const LambScalars s = lamb_scalars(numbers, terms, ratio);
  over_states(segment, [&](const Streams& io, size_t count) { HWY_DYNAMIC_DISPATCH(lamb_apply)(io, count, s); });
}

void lamb_apply_aten(const Segment& segment, const LambNumbers& numbers, const StepTerms& terms, double ratio) {
  const LambScalars s = lamb_scalars(numbers, terms, ratio);
  segment.master.sub_(update_aten(segment, s), s.step_size);
}

double lamb_ratio(const NormSquares& whole, double min_coeff, double max_coeff) {
  if (whole.param == 0.0 || whole.update == 0.0) return 1.0;
  const double trust = std::sqrt(whole.param) / std::sqrt(whole.update);
  return std::min(std::max(trust, min_coeff), max_coeff);
}

}  // namespace detail
}  // namespace deeptide::optim
#endif  // HWY_ONCE
