// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks, and the choice between kernels and ATen operators.
#include "optim/compressed_rule.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace deeptide::optim {

using at::Tensor;

namespace {

void check_exchanged(const Rule& rule, const char* name, const Tensor& values, const Tensor& master) {
  const bool fits = values.defined() && values.scalar_type() == at::kFloat && values.dim() == 1 &&
                    values.numel() == master.numel() && values.is_contiguous() && values.device() == master.device();
  TORCH_CHECK_VALUE(fits, rule.name(), " step: ", name, " must be a contiguous fp32 tensor of shape ", master.sizes(),
                    " on ", master.device(), " as master is");
}

}  // namespace

void CompressedRule::offer(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                           const Tensor& carried) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) return offer_reference(segment, hyper, terms, carried);
  check(segment, hyper, terms);
  check_exchanged(*this, "carried", carried, segment.master);
  offer_cpu(segment, hyper, terms, carried);
}

void CompressedRule::offer_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                                     const Tensor& carried) const {
  at::NoGradGuard no_grad;
  check(segment, hyper, terms);
  check_exchanged(*this, "carried", carried, segment.master);
  offer_aten(segment, hyper, terms, carried);
}

void CompressedRule::take(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                          const Tensor& mean) const {
  if (!segment.master.defined() || !segment.master.is_cpu()) return take_reference(segment, hyper, terms, mean);
  check_states(segment, hyper);
  check_exchanged(*this, "mean", mean, segment.master);
  take_cpu(segment, hyper, terms, mean);
}

void CompressedRule::take_reference(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                                    const Tensor& mean) const {
  at::NoGradGuard no_grad;
  check_states(segment, hyper);
  check_exchanged(*this, "mean", mean, segment.master);
  take_aten(segment, hyper, terms, mean);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

Exchanged exchanged_by(const Rule& rule, const std::vector<Hyperparameters>& groups, int64_t step) {
  const auto* compressed = dynamic_cast<const CompressedRule*>(&rule);
  const bool signs = compressed && std::all_of(groups.begin(), groups.end(), [&](const Hyperparameters& hyper) {
                       return compressed->exchanged(hyper, step) == Exchanged::signs;
                     });
  return signs ? Exchanged::signs : Exchanged::gradients;
}

}  // namespace deeptide::optim
