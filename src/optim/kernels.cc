// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks an optimizer step's tensors, rounds its scalars and sends it to the device's implementation.
#include "optim/kernels.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "optim/kernels_detail.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

void check_like_master(const char* what, const char* name, const Tensor& tensor, const Tensor& master) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": ", name, " is undefined, expected a tensor like master");
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.numel() == master.numel(), what, ": ", name, " has shape ",
                    tensor.sizes(), ", expected ", master.sizes(), " as master has");
  TORCH_CHECK_VALUE(tensor.device() == master.device(), what, ": ", name, " is on ", tensor.device(), ", expected ",
                    master.device(), " as master is");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, ": ", name, " is not contiguous; pass one slice of a flat buffer");
}

void check_fp32(const char* what, const char* name, const Tensor& tensor, const Tensor& master) {
  check_like_master(what, name, tensor, master);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat, what, ": ", name, " is ", tensor.scalar_type(),
                    ", expected Float");
}

void check_gradient(const char* what, const numerics::Contributions& gradient, const Tensor& master) {
  TORCH_CHECK_VALUE(!gradient.rows.empty(), what, ": the gradient has no rows, expected one a rank");
  for (const Tensor& row : gradient.rows) {
    check_like_master(what, "gradient", row, master);
    const auto type = row.scalar_type();
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, what, ": gradient is ", type,
                      ", expected Float, BFloat16 or Half");
    TORCH_CHECK_VALUE(type == gradient.rows[0].scalar_type(), what, ": a row of the gradient is ", type, ", another ",
                      gradient.rows[0].scalar_type(), "; expected one type");
  }
}

void check_common(const char* what, const Tensor& master, const numerics::Contributions& gradient, const Tensor& param,
                  int64_t step) {
  TORCH_CHECK_VALUE(master.defined() && master.dim() == 1, what, ": master must be a flat tensor of shape (N,)");
  check_fp32(what, "master", master, master);
  check_gradient(what, gradient, master);
  if (param.defined()) {
    check_like_master(what, "param", param, master);
    TORCH_CHECK_VALUE(param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf, what, ": param is ",
                      param.scalar_type(), ", expected BFloat16 or Half; in fp32 training leave it undefined");
  }
  TORCH_CHECK_VALUE(step >= 1, what, ": step is ", step, ", expected at least 1: steps are counted from 1");
}

}  // namespace

namespace detail {

AdamScalars adam_scalars(const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  const double correction1 = hyper.bias_correction ? 1.0 - std::pow(hyper.beta1, static_cast<double>(step)) : 1.0;
  const double correction2 = hyper.bias_correction ? 1.0 - std::pow(hyper.beta2, static_cast<double>(step)) : 1.0;
  return {
      .gradient_scale = static_cast<float>(gradient_scale),
      .l2_decay = static_cast<float>(hyper.decoupled_decay ? 0.0 : hyper.weight_decay),
      .keep = static_cast<float>(hyper.decoupled_decay ? 1.0 - hyper.lr * hyper.weight_decay : 1.0),
      .first_weight = static_cast<float>(1.0 - hyper.beta1),
      .second_weight = static_cast<float>(1.0 - hyper.beta2),
      .second_keep = static_cast<float>(hyper.beta2),
      .step_size = static_cast<float>(hyper.lr / correction1),
      .root_scale = static_cast<float>(std::sqrt(correction2)),
      .eps = static_cast<float>(hyper.eps),
  };
}

SgdScalars sgd_scalars(const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  return {
      .gradient_scale = static_cast<float>(gradient_scale),
      .l2_decay = static_cast<float>(hyper.weight_decay),
      .lr = static_cast<float>(hyper.lr),
      .momentum = static_cast<float>(hyper.momentum),
      .gradient_keep = static_cast<float>(1.0 - hyper.dampening),
      .first_step = step == 1,
      .nesterov = hyper.nesterov,
  };
}

}  // namespace detail

void adam_step(const AdamSegment& segment, const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  check_common("adam_step", segment.master, segment.gradient, segment.param, step);
  check_fp32("adam_step", "exp_avg", segment.exp_avg, segment.master);
  check_fp32("adam_step", "exp_avg_sq", segment.exp_avg_sq, segment.master);
  const auto scalars = detail::adam_scalars(hyper, step, gradient_scale);
  segment.master.is_cpu() ? detail::adam_step_cpu(segment, scalars) : detail::adam_step_reference(segment, scalars);
}

void sgd_step(const SgdSegment& segment, const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  check_common("sgd_step", segment.master, segment.gradient, segment.param, step);
  TORCH_CHECK_VALUE(segment.momentum.defined() == (hyper.momentum != 0.0), "sgd_step: momentum is ", hyper.momentum,
                    " but its buffer is ", segment.momentum.defined() ? "defined" : "undefined",
                    "; expected a buffer exactly when momentum is not 0");
  if (segment.momentum.defined()) check_fp32("sgd_step", "momentum", segment.momentum, segment.master);
  const auto scalars = detail::sgd_scalars(hyper, step, gradient_scale);
  segment.master.is_cpu() ? detail::sgd_step_cpu(segment, scalars) : detail::sgd_step_reference(segment, scalars);
}

const char* kernel_target() { return detail::chosen_target(); }

}  // namespace deeptide::optim
