// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adagrad as torch.optim.Adagrad: steps shrink with the sum of squared gradients; L2 decay is part of the gradient.
//
// g = gradient+wd*p; sum += g*g; p -= lr/(1+(t-1)*lr_decay) * g / (sqrt(sum)+eps). Bytes moved per element: 20 in
// fp32, 22 with a bf16 parameter. Source: Duchi et al., JMLR 12 (2011).
#include <ATen/core/Tensor.h>

#include "optim/rules/elementwise.h"
#include "optim/rules/rule.h"
#include "optim/updates/update_scalars.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/adagrad.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
#include "optim/updates/adagrad_update.inl"

void adagrad_kernel(const Streams& io, size_t count, const AdagradScalars& s) {
  step_streams<1>(io, count, AdagradUpdate{s});
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(adagrad_kernel);

class Adagrad final : public Rule {
 public:
  explicit Adagrad(const OptimizerInfo& info) : Rule(info, {{"sum"}}) {}

  std::optional<UpdateScalars> kernel_update(const Hyperparameters& hyper, const StepTerms& terms) const override {
    return scalars(hyper, terms);
  }

 private:
  AdagradScalars scalars(const Hyperparameters& hyper, const StepTerms& terms) const {
    const double shrinks = 1.0 + static_cast<double>(terms.step - 1) * hyper[lr_decay_];
    return {
        .step_size = static_cast<float>(hyper[lr_] / shrinks),
        .l2_decay = static_cast<float>(hyper[weight_decay_]),
        .eps = static_cast<float>(hyper[eps_]),
    };
  }

  void step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const AdagradScalars s = scalars(hyper, terms);
    detail::over_streams(segment, terms, [&](const detail::Streams& io, size_t count) {
      HWY_DYNAMIC_DISPATCH(adagrad_kernel)(io, count, s);
    });
  }

  void step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const override {
    const AdagradScalars s = scalars(hyper, terms);
    const Tensor gradient = detail::scaled_gradient(segment, terms, s.l2_decay), sum = segment.states[0];
    sum.addcmul_(gradient, gradient);
    segment.master.addcdiv_(gradient, sum.sqrt().add_(s.eps), -s.step_size);
  }

  const size_t lr_ = index_of("lr"), lr_decay_ = index_of("lr_decay"), eps_ = index_of("eps"),
               weight_decay_ = index_of("weight_decay");
};

const Registration kAdagrad("Adagrad", &make_rule<Adagrad>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
