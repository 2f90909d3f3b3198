// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// RMSprop as torch.optim.RMSprop: L2 decay, a momentum of normalized gradients, centered if asked for.
//
// g = gradient+wd*p; s = a*s+(1-a)*g*g; c = c+(1-a)(g-c); d = sqrt(s - c*c)+eps; b = momentum*b + g/d; p -= lr*b.
// Without centering c is 0, without momentum b is g/d, and neither is kept. Bytes moved per element: 20 in fp32, 8 more
// for each of the two. Source: Hinton's lecture 6e; Graves arXiv:1308.0850.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/div.h>
#include <ATen/ops/sqrt.h>

#include "optim/elementwise.h"
#include "optim/rule.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rmsprop.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/elementwise-inl.h"

#ifndef DEEPTIDE_OPTIM_RMSPROP_ONCE
#define DEEPTIDE_OPTIM_RMSPROP_ONCE
namespace deeptide::optim {

struct RmspropScalars {
  float lr;
  float l2_decay;
  float keep;    // alpha
  float weight;  // 1 - alpha
  float eps;
  float momentum;  // 0: no state
};

/// Places of the states.
enum : size_t { kSquareAvg, kGradAvg, kMomentumBuffer };

}  // namespace deeptide::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

struct RmspropUpdate {
  HWY_INLINE V decayed(V p, V g) const { return s.l2_decay != 0.0f ? hn::MulAdd(hn::Set(D(), s.l2_decay), p, g) : g; }
  HWY_INLINE void square(V g, V& squares) const {
    const V kept = hn::Mul(squares, hn::Set(D(), s.keep));
    squares = hn::MulAdd(hn::Mul(g, hn::Set(D(), s.weight)), g, kept);
  }
  HWY_INLINE void average(V g, V& mean) const { mean = lerp(mean, g, s.weight); }
  HWY_INLINE V divided(V g, V variance) const { return hn::Div(g, hn::Add(hn::Sqrt(variance), hn::Set(D(), s.eps))); }
  HWY_INLINE V moved(V p, V step) const { return hn::NegMulAdd(hn::Set(D(), s.lr), step, p); }
  HWY_INLINE V with_momentum(V p, V step, V& buffer) const {
    buffer = hn::Add(hn::Mul(buffer, hn::Set(D(), s.momentum)), step);
    return moved(p, buffer);
  }

  RmspropScalars s;
};

struct RmspropPlain : RmspropUpdate {
  HWY_INLINE V operator()(V p, V g, V& squares) const {
    g = decayed(p, g);
    square(g, squares);
    return moved(p, divided(g, squares));
  }
  HWY_INLINE V operator()(V p, V g, V& squares, V& buffer) const {
    g = decayed(p, g);
    square(g, squares);
    return with_momentum(p, divided(g, squares), buffer);
  }
};

struct RmspropCentered : RmspropUpdate {
  HWY_INLINE V step(V g, V& squares, V& mean) const {
    square(g, squares);
    average(g, mean);
    return divided(g, hn::NegMulAdd(mean, mean, squares));
  }
  HWY_INLINE V operator()(V p, V g, V& squares, V& mean) const { return moved(p, step(decayed(p, g), squares, mean)); }
  HWY_INLINE V operator()(V p, V g, V& squares, V& mean, V& buffer) const {
    return with_momentum(p, step(decayed(p, g), squares, mean), buffer);
  }
};

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
      variance = at::addcmul(squares, mean, mean, -1);
    }
    Tensor step = at::div(gradient, at::sqrt(variance).add_(s.eps));
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
