// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks and devices of the two passes, and whole steps made of them.
#include "optim/rules/two_pass_rule.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "optim/rules/step_device.h"

using at::Tensor;

namespace deeptide::optim {

void NormRule::measure(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, int64_t first,
                       NormSums& sums) const {
  at::NoGradGuard no_grad;
  check(segment, hyper, terms);
  if (segment.master.is_cpu()) return measure_cpu(segment, hyper, terms, first, sums);
  const auto scalars = kernel_scalars(hyper, terms, /*ratio=*/1.0);
  if (scalars && detail::has_lamb_kernel(segment)) {
    return detail::lamb_measure_by_kernel(segment, *scalars, first, sums);
  }
  measure_aten(segment, hyper, terms, first, sums);
}

void NormRule::apply(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms, double ratio) const {
  at::NoGradGuard no_grad;
  check_states(segment, hyper);
  if (segment.master.is_cpu()) return apply_cpu(segment, hyper, terms, ratio);
  const auto scalars = kernel_scalars(hyper, terms, ratio);
  if (scalars && detail::has_lamb_kernel(segment)) return detail::lamb_apply_by_kernel(segment, *scalars);
  apply_aten(segment, hyper, terms, ratio);
  if (segment.param.defined()) segment.param.copy_(segment.master);
}

void NormRule::step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  NormSums sums(segment.master.numel());
  measure_cpu(segment, hyper, terms, 0, sums);
  apply_cpu(segment, hyper, terms, ratio(sums.totals(), hyper));
}

void NormRule::step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  NormSums sums(segment.master.numel());
  measure_aten(segment, hyper, terms, 0, sums);
  apply_aten(segment, hyper, terms, ratio(sums.totals(), hyper));
}

bool is_muon_matrix(std::string_view name, at::IntArrayRef sizes) {
  const bool outer = name.find("embed") != std::string_view::npos || name.find("lm_head") != std::string_view::npos;
  return sizes.size() >= 2 && !outer;
}

MatrixRule::MatrixRule(const OptimizerInfo& info, std::vector<StateRole> roles)
    : Rule(info, std::move(roles), Reach::whole_parameter) {}

namespace {

void check_bf16(const Rule& rule, const char* name, const Tensor& values, const Tensor& master) {
  const bool fits = values.defined() && values.scalar_type() == at::kBFloat16 && values.dim() == 1 &&
                    values.numel() == master.numel() && values.is_contiguous() && values.device() == master.device();
  TORCH_CHECK_VALUE(fits, rule.name(), " step: ", name, " must be a contiguous bf16 tensor of shape ", master.sizes(),
                    " on ", master.device(), " as master is");
}

}  // namespace

void MatrixRule::direct(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms,
                        const Tensor& direction) const {
  at::NoGradGuard no_grad;
  check(segment, hyper, terms);
  check_bf16(*this, "direction", direction, segment.master);
  segment.master.is_cpu() ? direct_cpu(segment, hyper, terms, direction)
                          : direct_aten(segment, hyper, terms, direction);
}

void MatrixRule::apply(const Tensor& master, const Tensor& param, const Hyperparameters& hyper, MatrixSizes sizes,
                       const Tensor& update) const {
  at::NoGradGuard no_grad;
  check_bf16(*this, "update", update, master);
  if (master.is_cpu()) return apply_cpu(master, param, hyper, sizes, update);
  apply_aten(master, hyper, sizes, update);
  if (param.defined()) param.copy_(master);
}

void MatrixRule::step_cpu(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  if (reach(hyper) == Reach::elementwise) return step_elements(segment, hyper, terms, /*on_cpu=*/true);
  const int64_t numel = segment.master.numel();
  const MatrixSizes sizes{segment.rows, numel / segment.rows};
  const Tensor direction = at::empty({numel}, segment.master.options().dtype(at::kBFloat16));
  direct_cpu(segment, hyper, terms, direction);
  const Tensor update = update_of(direction.view({sizes.rows, sizes.columns}), hyper);
  apply_cpu(segment.master, segment.param, hyper, sizes, update.view({numel}));
}

void MatrixRule::step_aten(const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) const {
  if (reach(hyper) == Reach::elementwise) return step_elements(segment, hyper, terms, /*on_cpu=*/false);
  const int64_t numel = segment.master.numel();
  const MatrixSizes sizes{segment.rows, numel / segment.rows};
  const Tensor direction = at::empty({numel}, segment.master.options().dtype(at::kBFloat16));
  direct_aten(segment, hyper, terms, direction);
  const Tensor update = update_of(direction.view({sizes.rows, sizes.columns}), hyper);
  apply_aten(segment.master, hyper, sizes, update.view({numel}));
}

}  // namespace deeptide::optim
