// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The offer, which is one for all such rules; checks, and the choice between kernels and ATen operators.
#include "optim/compressed/compressed_rule.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "optim/rules/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/compressed/compressed_rule.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

/// States: m, and what is carried.
void offer_momentum(const Streams& io, size_t count, float weight) {
  const Streams own = io;
  each_vector(0, count, [own, weight](auto part, size_t i) {
    const D d;
    const V g = hn::Mul(load_gradient<Source::summed>(part, own.gradient, i), hn::Set(d, own.gradient.scale));
    const V m = part.get(own.states[0] + i);
    part.put(hn::Add(part.get(own.states[1] + i), lerp(m, g, weight)), own.states[1] + i);
  });
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {

using at::Tensor;

HWY_EXPORT(offer_momentum);

void CompressedRule::check_exchanged(const char* name, const Tensor& values, const Segment& segment) const {
  const Tensor& master = segment.master;
  const bool fits = values.defined() && values.scalar_type() == at::kFloat && values.dim() == 1 &&
                    values.numel() == master.numel() && values.is_contiguous() && values.device() == master.device();
  TORCH_CHECK_VALUE(fits, this->name(), " step: ", name, " must be a contiguous fp32 tensor of shape ", master.sizes(),
                    " on ", master.device(), " as master is");
}

void CompressedRule::offer(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                           const Tensor& carried) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) return offer_reference(segment, hyper, terms, carried);
  check(segment, hyper, terms);
  check_exchanged("carried", carried, segment);
  Segment own = segment;
  own.states = {segment.states[0], carried};
  own.param = Tensor();  // no parameter is written, and every gradient is read as a sum
  const float weight = momentum_weight(hyper);
  detail::over_streams(own, terms, [&](const detail::Streams& io, size_t count) {
    HWY_DYNAMIC_DISPATCH(offer_momentum)(io, count, weight);
  });
}

void CompressedRule::offer_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                                     const Tensor& carried) const {
  at::NoGradGuard no_grad;
  check(segment, hyper, terms);
  check_exchanged("carried", carried, segment);
  const Tensor gradient = detail::scaled_gradient(segment, terms, /*l2_decay=*/0.0f);
  carried.add_(segment.states[0].lerp(gradient, momentum_weight(hyper)));
}

void CompressedElementRule::take(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                                 const Tensor& mean) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) return take_reference(segment, hyper, terms, mean);
  check_states(segment, hyper);
  check_exchanged("mean", mean, segment);
  take_cpu(segment, hyper, terms, mean);
}

void CompressedElementRule::take_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                                           const Tensor& mean) const {
  at::NoGradGuard no_grad;
  check_states(segment, hyper);
  check_exchanged("mean", mean, segment);
  take_aten(segment, hyper, terms, mean);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

TakenTotals TakenSums::totals() const {
  const std::lock_guard lock(mutex_);
  return {direction.total(), update.total(), factor_};
}

void TakenSums::note_factor(float of_some) {
  const std::lock_guard lock(mutex_);
  factor_ = std::max(factor_, of_some);
}

void CompressedNormRule::take_states(const Segment& segment, const Hyperparameters& hyper,
                                     std::span<const double> numbers, const Tensor& mean, int64_t first,
                                     TakenSums& sums) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) {
    return take_states_reference(segment, hyper, numbers, mean, first, sums);
  }
  check_states(segment, hyper);
  check_exchanged("mean", mean, segment);
  take_states_cpu(segment, hyper, numbers, mean, first, sums);
}

void CompressedNormRule::take_states_reference(const Segment& segment, const Hyperparameters& hyper,
                                               std::span<const double> numbers, const Tensor& mean, int64_t first,
                                               TakenSums& sums) const {
  at::NoGradGuard no_grad;
  check_states(segment, hyper);
  check_exchanged("mean", mean, segment);
  if (mean.numel() > 0) take_states_aten(segment, hyper, numbers, mean, first, sums);
}

Exchanged exchanged_by(const Rule& rule, const std::vector<Hyperparameters>& groups, int64_t step) {
  const auto* compressed = rule.compressed();
  const bool signs = compressed && std::all_of(groups.begin(), groups.end(), [&](const Hyperparameters& hyper) {
                       return compressed->exchanged(hyper, step) == Exchanged::signs;
                     });
  return signs ? Exchanged::signs : Exchanged::gradients;
}

}  // namespace deeptide::optim
#endif  // HWY_ONCE
