// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// SGD as torch.optim.SGD: L2 decay, a momentum that starts as the first gradient, dampening, Nesterov.
#include <ATen/core/Tensor.h>

#include "optim/rules/elementwise.h"
#include "optim/rules/rule.h"
#include "optim/updates/update_scalars.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/sgd.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
#include "optim/updates/sgd_update.inl"

void sgd_kernel(const Streams& io, size_t count, const SgdScalars& s) {
  io.keeps(0) ? step_streams<1>(io, count, SgdUpdate{s}) : step_streams<0>(io, count, SgdUpdate{s});
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(sgd_kernel);

class Sgd final : public Rule {
 public:
  explicit Sgd(const OptimizerInfo& info) : Rule(info, {{.name = "momentum", .unless_zero = "momentum"}}) {}

  std::optional<UpdateScalars> kernel_update(const Hyperparameters& hyper, const StepTerms& terms) const override {
    return scalars(hyper, terms);
  }

 private:
  SgdScalars scalars(const Hyperparameters& hyper, const StepTerms& terms) const {
    return {
        .l2_decay = static_cast<float>(hyper[weight_decay_]),
        .lr = static_cast<float>(hyper[lr_]),
        .momentum = static_cast<float>(hyper[momentum_]),
        .gradient_keep = terms.step == 1 ? 1.0f : static_cast<float>(1.0 - hyper[dampening_]),
        .nesterov = hyper[nesterov_] != 0.0,
    };
  }

  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const SgdScalars s = scalars(hyper, terms);
    detail::over_streams(segment, terms, [&](const detail::Streams& io, size_t count) {
      HWY_DYNAMIC_DISPATCH(sgd_kernel)(io, count, s);
    });
  }

  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const SgdScalars s = scalars(hyper, terms);
    Tensor update = detail::scaled_gradient(segment, terms, s.l2_decay);
    const Tensor momentum = segment.states[0];
    if (momentum.defined()) {
      momentum.mul_(s.momentum).add_(update, s.gradient_keep);
      update = s.nesterov ? update.add_(momentum, s.momentum) : momentum;
    }
    segment.master.add_(update, -s.lr);
  }

  const size_t lr_ = index_of("lr"), momentum_ = index_of("momentum"), dampening_ = index_of("dampening"),
               weight_decay_ = index_of("weight_decay"), nesterov_ = index_of("nesterov");
};

const Registration kSgd("SGD", &make_rule<Sgd>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
