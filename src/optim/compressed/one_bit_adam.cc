// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam and 0/1 Adam: AdamW without bias correction in some steps; in the others the second moment stays, and
// ranks exchange the signs of their momenta. They differ in which steps these are.
//
// With gradients: m = m+(1-b1)(g-m); v = b2*v+(1-b2)g*g; p = p*(1-lr*wd) - lr * m / (sqrt(v) + eps), g the ranks' mean.
// By signs: m = mean over ranks, from signs, of m+(1-b1)(own g - m); v stays; p as before.
// Source: Tang et al. arXiv:2102.02888; Lu et al. arXiv:2202.06009, without its local steps; DeepSpeed's
// runtime/fp16/onebit/adam.py, zoadam.py.
#include <ATen/core/Tensor.h>

#include "optim/compressed/compressed_rule.h"
#include "optim/rules/adam.h"
#include "optim/rules/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/compressed/one_bit_adam.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

#ifndef DEEPTIDE_OPTIM_ONE_BIT_ADAM_ONCE
#define DEEPTIDE_OPTIM_ONE_BIT_ADAM_ONCE
namespace deeptide::optim {

struct OneBitAdamScalars {
  float keep;  // 1 - lr * weight_decay
  float lr;
  float eps;
};

}  // namespace deeptide::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

/// States: m, v, and the mean. Where no gradient came before signs did, v is 0, and the mean itself takes its place:
/// the element moves by the rate at most, as in a first step.
void one_bit_adam_take(const Streams& io, size_t count, const OneBitAdamScalars& s) {
  move_master(io, count, [io, s](auto part, size_t i) {
    const D d;
    const V m = part.get(io.states[2] + i), v = part.get(io.states[1] + i);
    part.put(m, io.states[0] + i);
    const V root = hn::IfThenElse(hn::Eq(v, hn::Zero(d)), hn::Abs(m), hn::Sqrt(v));
    const V denominator = hn::Add(root, hn::Set(d, s.eps));
    const V p = hn::Mul(part.get(io.master + i), hn::Set(d, s.keep));
    return hn::Sub(p, hn::Div(hn::Mul(hn::Set(d, s.lr), m), denominator));
  });
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(one_bit_adam_take);

std::vector<StateRole> roles_of_adam() { return {{"exp_avg"}, {"exp_avg_sq"}}; }

/// The part that the two share: all but their steps with gradients.
class AdamBySigns : public CompressedElementRule {
 public:
  std::optional<UpdateScalars> kernel_update(const Hyperparameters& hyper, const StepTerms& terms) const override {
    return detail::adam_scalars(warm_up(hyper), terms.step);
  }

 private:
  float momentum_weight(const Hyperparameters& hyper) const override { return static_cast<float>(1.0 - hyper[beta1_]); }

  AdamNumbers warm_up(const Hyperparameters& hyper) const {
    return {.lr = hyper[lr_],
            .beta1 = hyper[beta1_],
            .beta2 = hyper[beta2_],
            .eps = hyper[eps_],
            .weight_decay = hyper[weight_decay_],
            .decoupled = true,
            .bias_correction = false};
  }

  OneBitAdamScalars scalars(const Hyperparameters& hyper) const {
    return {.keep = static_cast<float>(1.0 - hyper[lr_] * hyper[weight_decay_]),
            .lr = static_cast<float>(hyper[lr_]),
            .eps = static_cast<float>(hyper[eps_])};
  }

  /// The segment with a third state: what the ranks exchange.
  static Segment with(const Segment& segment, const Tensor& exchanged) {
    Segment more = segment;
    more.states.push_back(exchanged);
    return more;
  }

  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    detail::adam_cpu(segment, warm_up(hyper), terms);
  }

  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    detail::adam_aten(segment, warm_up(hyper), terms);
  }

  void take_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& /*terms*/,
                const Tensor& mean) const override {
    const OneBitAdamScalars s = scalars(hyper);
    detail::over_states(with(segment, mean), [&](const detail::Streams& io, size_t count) {
      HWY_DYNAMIC_DISPATCH(one_bit_adam_take)(io, count, s);
    });
  }

  void take_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& /*terms*/,
                 const Tensor& mean) const override {
    const OneBitAdamScalars s = scalars(hyper);
    segment.states[0].copy_(mean);
    const Tensor& v = segment.states[1];
    const Tensor root = mean.abs().where(v.eq(0), v.sqrt());
    segment.master.mul_(s.keep).addcdiv_(mean, root.add(s.eps), -s.lr);
  }

  const size_t lr_ = index_of("lr"), beta1_ = index_of("beta1"), beta2_ = index_of("beta2"), eps_ = index_of("eps"),
               weight_decay_ = index_of("weight_decay");
};

class OneBitAdam final : public AdamBySigns {
 public:
  explicit OneBitAdam(const OptimizerInfo& info) : Rule(info, roles_of_adam()) {}

  Exchanged exchanged(const Hyperparameters& hyper, int64_t step) const override {
    return static_cast<double>(step) > hyper[freeze_step_] ? Exchanged::signs : Exchanged::gradients;
  }

 private:
  const size_t freeze_step_ = index_of("freeze_step");
};

class ZeroOneAdam final : public AdamBySigns {
 public:
  explicit ZeroOneAdam(const OptimizerInfo& info) : Rule(info, roles_of_adam()) {}

  /// The second moment moves at multiples of an interval, which doubles after every `var_update_scaler` such steps.
  Exchanged exchanged(const Hyperparameters& hyper, int64_t step) const override {
    if (static_cast<double>(step) > hyper[freeze_step_]) return Exchanged::signs;
    const auto times = static_cast<int64_t>(hyper[scaler_]);
    int64_t interval = 1, last = times;  // the last step that this interval is for
    while (last < step) {
      interval *= 2;
      last = (last / interval + times) * interval;
    }
    return step % interval == 0 ? Exchanged::gradients : Exchanged::signs;
  }

 private:
  const size_t freeze_step_ = index_of("var_freeze_step"), scaler_ = index_of("var_update_scaler");
};

const Registration kOneBitAdam("OneBitAdam", &make_rule<OneBitAdam>);
const Registration kZeroOneAdam("ZeroOneAdam", &make_rule<ZeroOneAdam>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
