// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts lists of tensors into what one launch takes.
#include "numerics/kernels/copies.h"

#include <ATen/core/grad_mode.h>

#include "numerics/kernels/kernel_tensors.h"
#include "numerics/rounding/rounding.h"

using at::Tensor;

namespace deeptide::numerics {

namespace {

constexpr int64_t kLarge = 1 << 20;  // elements: worth a launch of their own

bool is_dense(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
         (tensor.scalar_type() == at::kFloat || is_half_width(tensor.scalar_type()));
}

}  // namespace

namespace detail {

bool fits_copy_kernel(const Tensor& from, const Tensor& to) {
  return from.device() == to.device() && from.numel() == to.numel() && to.numel() <= kLarge && is_dense(from) &&
         is_dense(to);
}

void copy_in_batches(at::TensorList from, at::TensorList to,
                     const std::function<void(const kernel::CopyArguments&)>& launch) {
  at::NoGradGuard no_grad;
  kernel::CopyArguments batch;
  const auto flush = [&] {
    if (batch.pairs > 0) launch(batch);
    batch.pairs = 0;
  };
  for (size_t k = 0; k < to.size(); ++k) {
    if (!fits_copy_kernel(from[k], to[k])) {
      to[k].copy_(from[k]);
      continue;
    }
    if (batch.pairs == kernel::CopyArguments::kMost) flush();
    const int pair = batch.pairs++;
    batch.from[pair] = read_numbers_of(from[k]);
    batch.to[pair] = numbers_of(to[k]);
    batch.begin[pair + 1] = batch.begin[pair] + to[k].numel();
  }
  flush();
}

}  // namespace detail

void copy_all(at::TensorList from, at::TensorList to) {
  TORCH_CHECK_VALUE(from.size() == to.size(), "copy_all: got ", from.size(), " sources, expected ", to.size());
  if (to.empty()) return;
  const at::Device device = to[0].device();
  static constexpr Kernel<kernel::CopyArguments> kCopy{"copy", &device_kernels::has_copy, &device_kernels::copy};
  if (kCopy.is_on(device)) {
    detail::copy_in_batches(from, to, [&](const kernel::CopyArguments& batch) { kCopy.run(device, batch); });
    return;
  }
  at::NoGradGuard no_grad;
  for (size_t k = 0; k < to.size(); ++k) to[k].copy_(from[k]);
}

}  // namespace deeptide::numerics
