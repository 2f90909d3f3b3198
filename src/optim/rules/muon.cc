// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Muon: a matrix moves by its momentum, orthogonalized; groups with use_muon off are AdamW's, or Adam's with L2 decay.
//
// m = m+(1-mu)(g-m); d = g+mu*(m-g), or m without Nesterov; O = Newton-Schulz of d in bf16; p *= 1-lr*wd;
// p -= lr*sqrt(max(1, rows/columns)) * O, or lr*0.2*sqrt(max(rows, columns)) * O. In the operations and the order of
// torch.optim.Muon. Source: Jordan et al. kellerjordan.github.io/posts/muon; Liu et al. arXiv:2502.16982.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "optim/rules/adam.h"
#include "optim/rules/elementwise.h"
#include "optim/rules/two_pass_rule.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/muon.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "optim/rules/elementwise-inl.h"

#ifndef DEEPTIDE_OPTIM_MUON_ONCE
#define DEEPTIDE_OPTIM_MUON_ONCE
namespace deeptide::optim {

struct MuonDirection {
  float weight;    // 1 - momentum
  float momentum;  // of Nesterov's look ahead
  float gradient_scale;
  bool nesterov;
};

struct MuonMove {
  float keep;  // 1 - lr * weight_decay
  float rate;
};

/// Places of the states.
enum : size_t { kMuonMomentum, kMuonExpAvg, kMuonExpAvgSq };

}  // namespace deeptide::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {

void muon_direct(float* momentum, const float* gradient, size_t count, const MuonDirection& s,
                 c10::BFloat16* direction) {
  each_vector(0, count, [=](auto part, size_t i) {
    const V g = hn::Mul(part.get(gradient + i), hn::Set(D(), s.gradient_scale));
    const V m = lerp(part.get(momentum + i), g, s.weight);
    part.put(m, momentum + i);
    part.put(s.nesterov ? lerp(g, m, s.momentum) : m, direction + i);
  });
}

void muon_apply(const Streams& io, size_t count, const MuonMove& s, const c10::BFloat16* update) {
  move_master(io, count, [=](auto part, size_t i) {
    const V kept = hn::Mul(part.get(io.master + i), hn::Set(D(), s.keep));
    return hn::NegMulAdd(hn::Set(D(), s.rate), part.get(update + i), kept);
  });
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {
namespace {

using at::Tensor;

HWY_EXPORT(muon_direct);
HWY_EXPORT(muon_apply);

/// Whether products of fp32 matrices, rounded to bf16, are faster than those of bf16 matrices. On x86 without AVX-512,
/// torch has plain loops for the latter, 30 to 70 times slower. Both add up in fp32.
bool slow_in_bf16([[maybe_unused]] const Tensor& matrix) {
#if HWY_ARCH_X86
  static const bool kPlainLoops = (hwy::SupportedTargets() & HWY_AVX3) == 0;
  return kPlainLoops && !matrix.is_cuda();
#else
  return false;
#endif
}

class Muon final : public MatrixRule {
 public:
  explicit Muon(const OptimizerInfo& info)
      : MatrixRule(info, {{.name = "momentum_buffer", .unless_zero = "use_muon"},
                          {.name = "exp_avg", .only_at_zero = "use_muon"},
                          {.name = "exp_avg_sq", .only_at_zero = "use_muon"}}) {}

  Reach reach(const Hyperparameters& hyper) const override {
    return hyper[use_muon_] != 0.0 ? Reach::whole_parameter : Reach::elementwise;
  }

  std::optional<UpdateScalars> kernel_update(const Hyperparameters& hyper, const StepTerms& terms) const override {
    if (reach(hyper) != Reach::elementwise) return std::nullopt;
    return detail::adam_scalars(adam_numbers(hyper), terms.step);
  }

  Tensor update_of(const Tensor& direction, const Hyperparameters& hyper) const override {
    const bool tall = direction.size(0) > direction.size(1);
    Tensor x = tall ? direction.t().contiguous() : direction.clone();
    x.div_(x.norm().clamp_min_(hyper[eps_]));  // the spectral norm is at most this one
    const bool widens = slow_in_bf16(x);
    const auto rounded = [&](const Tensor& product) {
      return widens ? product.to(at::kBFloat16).to(at::kFloat) : product;
    };
    if (widens) x = x.to(at::kFloat);
    for (int i = 0; i < static_cast<int>(hyper[ns_steps_]); ++i) {
      const Tensor gram = rounded(x.mm(x.t()));
      const Tensor polynomial = rounded(gram.addmm(gram, gram, hyper[second_], hyper[third_]));
      x = rounded(x.addmm(polynomial, x, hyper[first_]));
    }
    return (tall ? x.t() : x).to(at::kBFloat16).contiguous();
  }

 private:
  AdamNumbers adam_numbers(const Hyperparameters& hyper) const {
    return {.lr = hyper[lr_],
            .beta1 = hyper[beta1_],
            .beta2 = hyper[beta2_],
            .eps = hyper[eps_],
            .weight_decay = hyper[weight_decay_],
            .decoupled = hyper[decoupled_] != 0.0};
  }

  MuonDirection direction_numbers(const Hyperparameters& hyper, const StepTerms& terms) const {
    return {
        .weight = static_cast<float>(1.0 - hyper[momentum_]),
        .momentum = static_cast<float>(hyper[momentum_]),
        .gradient_scale = static_cast<float>(terms.gradient_scale),
        .nesterov = hyper[nesterov_] != 0.0,
    };
  }

  MuonMove move_numbers(const Hyperparameters& hyper, MatrixSizes sizes) const {
    const auto rows = static_cast<double>(sizes.rows), columns = static_cast<double>(sizes.columns);
    const double factor = hyper[match_rms_adamw_] != 0.0 ? 0.2 * std::sqrt(std::max(rows, columns))
                                                         : std::sqrt(std::max(1.0, rows / columns));
    return {
        .keep = static_cast<float>(1.0 - hyper[lr_] * hyper[weight_decay_]),
        .rate = static_cast<float>(hyper[lr_] * factor),
    };
  }

  void step_elements(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                     bool on_cpu) const override {
    Segment adam = segment;
    adam.states = {segment.states[kMuonExpAvg], segment.states[kMuonExpAvgSq]};
    const AdamNumbers numbers = adam_numbers(hyper);
    on_cpu ? detail::adam_cpu(adam, numbers, terms) : detail::adam_aten(adam, numbers, terms);
  }

  void direct_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                  const Tensor& direction) const override {
    const MuonDirection s = direction_numbers(hyper, terms);
    auto* momentum = segment.states[kMuonMomentum].mutable_data_ptr<float>();
    auto* to = direction.mutable_data_ptr<c10::BFloat16>();
    detail::over_blocks(segment, 0, [&](int64_t begin, int64_t count, const float* gradient) {
      HWY_DYNAMIC_DISPATCH(muon_direct)(momentum + begin, gradient, static_cast<size_t>(count), s, to + begin);
    });
  }

  void apply_cpu(const Tensor& master, const Tensor& param, const Hyperparameters& hyper, MatrixSizes sizes,
                 const Tensor& update) const override {
    const MuonMove s = move_numbers(hyper, sizes);
    const float* first = master.const_data_ptr<float>();
    const auto* from = update.const_data_ptr<c10::BFloat16>();
    detail::over_states({master, {}, {}, param}, [&](const detail::Streams& io, size_t count) {
      HWY_DYNAMIC_DISPATCH(muon_apply)(io, count, s, from + (io.master - first));
    });
  }

  void direct_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                   const Tensor& direction) const override {
    const MuonDirection s = direction_numbers(hyper, terms);
    const Tensor gradient = detail::scaled_gradient(segment, terms, /*l2_decay=*/0.0f);
    const Tensor momentum = segment.states[kMuonMomentum].lerp_(gradient, s.weight);
    direction.copy_(s.nesterov ? gradient.lerp(momentum, s.momentum) : momentum);
  }

  void apply_aten(const Tensor& master, const Hyperparameters& hyper, MatrixSizes sizes,
                  const Tensor& update) const override {
    const MuonMove s = move_numbers(hyper, sizes);
    master.mul_(s.keep).sub_(update, s.rate);
  }

  const size_t lr_ = index_of("lr"), momentum_ = index_of("momentum"), nesterov_ = index_of("nesterov"),
               weight_decay_ = index_of("weight_decay"), beta1_ = index_of("beta1"), beta2_ = index_of("beta2"),
               eps_ = index_of("eps"), ns_steps_ = index_of("ns_steps"), first_ = index_of("ns_coefficient1"),
               second_ = index_of("ns_coefficient2"), third_ = index_of("ns_coefficient3"),
               match_rms_adamw_ = index_of("match_rms_adamw"), use_muon_ = index_of("use_muon"),
               decoupled_ = index_of("decoupled_weight_decay");
};

const Registration kMuon("Muon", &make_rule<Muon>);

}  // namespace
}  // namespace deeptide::optim
#endif  // HWY_ONCE
