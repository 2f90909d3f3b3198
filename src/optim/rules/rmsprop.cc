// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// RMSprop as torch.optim.RMSprop: L2 decay, a momentum of normalized gradients, centered if asked for.
//
// g = gradient+wd*p; s = a*s+(1-a)*g*g; c = c+(1-a)(g-c); d = sqrt(s - c*c)+eps; b = momentum*b + g/d; p -= lr*b.
// Without centering c is 0, without momentum b is g/d, and neither is kept. Bytes moved per element: 20 in fp32, 8 more
// for each of the two. Source: Hinton's lecture 6e; Graves arXiv:1308.0850.
#include <ATen/core/Tensor.h>

#include "optim/rules/elementwise.h"
#include "optim/rules/rule.h"
#include "optim/updates/update_scalars.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/rmsprop.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

#ifndef DEEPTIDE_OPTIM_RMSPROP_ONCE
#define DEEPTIDE_OPTIM_RMSPROP_ONCE
namespace deeptide::optim {

/// Places of the states.
enum : size_t { kSquareAvg, kGradAvg, kMomentumBuffer };

}  // namespace deeptide::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
#include "optim/updates/rmsprop_update.inl"

void rmsprop_kernel(const Streams& all, size_t count, const RmspropScalars& s) {
  Streams io = all;
  const bool centered = io.keeps(kGradAvg), moves = io.keeps(kMomentumBuffer);
  if (centered) {
    moves ? step_streams<3>(io, count, RmspropCentered{{s}}) : step_streams<2>(io, count, RmspropCentered{{s}});
  } else {
    io.states[1] = io.states[kMomentumBuffer];
    io.half_states[1] = io.half_states[kMomentumBuffer];
    moves ? step_streams<2>(io, count, RmspropPlain{{s}}) : step_streams<1>(io, count, RmspropPlain{{s}});
  }
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(rmsprop_kernel);

class Rmsprop final : public Rule {
 public:
  explicit Rmsprop(const OptimizerInfo& info)
      : Rule(info, {{"square_avg"},
                    {.name = "grad_avg", .unless_zero = "centered"},
                    {.name = "momentum_buffer", .unless_zero = "momentum"}}) {}

  std::string needs_fp32_states(const Hyperparameters& hyper) const override {
    return hyper[centered_] == 0.0 ? ""
                                   : "with \"centered\" it takes the root of square_avg - grad_avg^2, which rounding "
                                     "makes negative; set centered to false";
  }

  std::optional<UpdateScalars> kernel_update(const Hyperparameters& hyper, const StepTerms& /*terms*/) const override {
    return scalars(hyper);
  }

 private:
  RmspropScalars scalars(const Hyperparameters& hyper) const {
    return {
        .lr = static_cast<float>(hyper[lr_]),
        .l2_decay = static_cast<float>(hyper[weight_decay_]),
        .keep = static_cast<float>(hyper[alpha_]),
        .weight = static_cast<float>(1.0 - hyper[alpha_]),
        .eps = static_cast<float>(hyper[eps_]),
        .momentum = static_cast<float>(hyper[momentum_]),
    };
  }

  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const RmspropScalars s = scalars(hyper);
    detail::over_streams(segment, terms, [&](const detail::Streams& io, size_t count) {
      HWY_DYNAMIC_DISPATCH(rmsprop_kernel)(io, count, s);
    });
  }

  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const RmspropScalars s = scalars(hyper);
    const Tensor gradient = detail::scaled_gradient(segment, terms, s.l2_decay);
    const Tensor squares = segment.states[kSquareAvg], mean = segment.states[kGradAvg],
                 buffer = segment.states[kMomentumBuffer];
    squares.mul_(s.keep).addcmul_(gradient, gradient, s.weight);
    Tensor variance = squares;
    if (mean.defined()) {
      mean.lerp_(gradient, s.weight);
      variance = squares.addcmul(mean, mean, -1);
    }
    Tensor step = gradient.div(variance.sqrt().add_(s.eps));
    if (buffer.defined()) step = buffer.mul_(s.momentum).add_(step);
    segment.master.sub_(step, s.lr);
  }

  const size_t lr_ = index_of("lr"), alpha_ = index_of("alpha"), eps_ = index_of("eps"),
               weight_decay_ = index_of("weight_decay"), momentum_ = index_of("momentum"),
               centered_ = index_of("centered");
};

const Registration kRmsprop("RMSprop", &make_rule<Rmsprop>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
