// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies of many tensors at once, into a bucket and out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "numerics/kernels/copy_kernel.h"

namespace deeptide::numerics {

/// to[k] = from[k] for each k, with cast: what `copy_` does. On a GPU with kernels, those of at most a million elements
/// take one launch per 64 of them. Shapes: from[k] as to[k]; no memory of `to` overlaps another's or a `from`.
void copy_all(at::TensorList from, at::TensorList to);

namespace detail {

/// Whether a kernel can copy these two, which are on one device: dense, contiguous, not large, of its types.
bool fits_copy_kernel(const at::Tensor& from, const at::Tensor& to);

/// Gives the pairs that fit to `launch`, as many as it takes at a time, and copies the others.
void copy_in_batches(at::TensorList from, at::TensorList to,
                     const std::function<void(const kernel::CopyArguments&)>& launch);

}  // namespace detail
}  // namespace deeptide::numerics
