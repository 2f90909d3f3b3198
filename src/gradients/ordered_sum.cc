// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks the tensors of a reduction and sends them to the device's implementation; finds the culprit of a NaN.
#include "gradients/ordered_sum.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/isfinite.h>
#include <c10/util/Exception.h>

#include "gradients/ordered_sum_detail.h"

using at::Tensor;

namespace deeptide::gradients {
namespace {

bool is_wire_dtype(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

void check_contributions(const char* what, const Tensor& contributions, const Tensor& accumulator) {
  TORCH_CHECK_VALUE(accumulator.defined() && accumulator.dim() == 1 && accumulator.is_contiguous(), what,
                    ": accumulator must be a contiguous tensor of shape (N,)");
  TORCH_CHECK_VALUE(accumulator.scalar_type() == at::kFloat, what, ": accumulator is ", accumulator.scalar_type(),
                    ", expected Float");
  TORCH_CHECK_VALUE(contributions.defined() && contributions.dim() == 2 && contributions.size(0) >= 1 &&
                        contributions.size(1) == accumulator.numel(),
                    what, ": contributions have shape ",
                    contributions.defined() ? contributions.sizes() : at::IntArrayRef{}, ", expected (W, ",
                    accumulator.numel(), ") with one row a rank");
  TORCH_CHECK_VALUE(is_wire_dtype(contributions.scalar_type()), what, ": contributions are ",
                    contributions.scalar_type(), ", expected Float, BFloat16 or Half");
  TORCH_CHECK_VALUE(contributions.size(1) <= 1 || contributions.stride(1) == 1, what,
                    ": each row of contributions must be contiguous, got a stride of ", contributions.stride(1));
  TORCH_CHECK_VALUE(contributions.device() == accumulator.device(), what, ": contributions are on ",
                    contributions.device(), ", expected ", accumulator.device(), " as the accumulator is");
}

}  // namespace

void ordered_sum(const Tensor& contributions, double scale, bool overwrite, Tensor accumulator, Tensor sum_of_squares) {
  check_contributions("ordered_sum", contributions, accumulator);
  TORCH_CHECK_VALUE(sum_of_squares.defined() && sum_of_squares.dim() == 1 && sum_of_squares.numel() == 1 &&
                        sum_of_squares.scalar_type() == at::kDouble,
                    "ordered_sum: sum_of_squares must be one Double, of shape (1,)");
  TORCH_CHECK_VALUE(sum_of_squares.device() == accumulator.device(), "ordered_sum: sum_of_squares is on ",
                    sum_of_squares.device(), ", expected ", accumulator.device(), " as the accumulator is");
  const auto implementation = accumulator.is_cpu() ? detail::ordered_sum_cpu : detail::ordered_sum_reference;
  implementation(contributions, static_cast<float>(scale), overwrite, accumulator, sum_of_squares);
}

void accumulate(const Tensor& gradient, bool overwrite, Tensor accumulator) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(gradient.defined() && accumulator.defined() && gradient.dim() == 1 && accumulator.dim() == 1 &&
                        gradient.numel() == accumulator.numel(),
                    "accumulate: the gradient has shape ", gradient.defined() ? gradient.sizes() : at::IntArrayRef{},
                    ", the accumulator ", accumulator.defined() ? accumulator.sizes() : at::IntArrayRef{},
                    "; expected (N,) for both");
  TORCH_CHECK_VALUE(at::isFloatingType(gradient.scalar_type()) && at::isFloatingType(accumulator.scalar_type()),
                    "accumulate: got a gradient of ", gradient.scalar_type(), " and an accumulator of ",
                    accumulator.scalar_type(), ", expected floating types");
  TORCH_CHECK_VALUE(gradient.device() == accumulator.device(), "accumulate: the gradient is on ", gradient.device(),
                    ", expected ", accumulator.device(), " as the accumulator is");
  // ATen adds two dtypes on the CPU through a temporary; its other combinations are one pass already.
  const bool widens = accumulator.scalar_type() == at::kFloat && gradient.scalar_type() != at::kFloat &&
                      is_wire_dtype(gradient.scalar_type());
  if (overwrite) {
    accumulator.copy_(gradient);
  } else if (widens && accumulator.is_cpu() && gradient.is_contiguous() && accumulator.is_contiguous()) {
    detail::accumulate_cpu(gradient, accumulator);
  } else {
    accumulator.add_(gradient);
  }
}

std::optional<NonFinite> find_non_finite(const Tensor& contributions, const Tensor& accumulator) {
  check_contributions("find_non_finite", contributions, accumulator);
  if (accumulator.numel() == 0) return std::nullopt;
  // argmax gives the first of equal values.
  const Tensor bad = at::isfinite(accumulator).logical_not();
  const int64_t index = at::argmax(bad.to(at::kByte)).item<int64_t>();
  if (!bad[index].item<bool>()) return std::nullopt;
  const Tensor bad_ranks = at::isfinite(contributions.select(1, index)).logical_not();
  const int64_t rank = at::argmax(bad_ranks.to(at::kByte)).item<int64_t>();
  return NonFinite{index, bad_ranks[rank].item<bool>() ? static_cast<int>(rank) : -1};
}

}  // namespace deeptide::gradients
