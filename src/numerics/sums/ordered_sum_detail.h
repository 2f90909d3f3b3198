// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The two implementations behind ordered_sum.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include "numerics/sums/ordered_sum.h"
#include "numerics/sums/sum_kernel.h"

namespace deeptide::numerics::detail {

/// Vector code, chosen at run time. Multiplies and adds are never fused and the sum of squares is spread over 32 lanes
/// whatever the width of a vector, so the results are the same bits on every instruction set. Adds to sum_of_squares.
void ordered_sum_cpu(at::TensorList rows, float scale, bool overwrite, const at::Tensor& accumulator,
                     const at::Tensor& sum_of_squares);

/// The same sum of squares; the sums go no further than the cache.
void ordered_squares_cpu(at::TensorList rows, float scale, const at::Tensor& sum_of_squares);

/// accumulator += gradient. Shapes: gradient (N,) bf16|fp16 contiguous; accumulator (N,) fp32 contiguous.
void accumulate_cpu(const at::Tensor& gradient, const at::Tensor& accumulator);
const char* chosen_target();

/// The same in ATen operators: the oracle in tests, and what runs on devices without a kernel of their own.
void ordered_sum_reference(at::TensorList rows, float scale, bool overwrite, const at::Tensor& accumulator,
                           const at::Tensor& sum_of_squares);

/// Whether a kernel takes these rows, which are on one device.
bool has_sum_kernel(at::TensorList rows);
bool has_sum_kernel_on(at::Device device);
/// Adds to sum_of_squares those of pieces that fit, as if they were one row.
void ordered_squares_kernel(const Contributions& contributions, const at::Tensor& sum_of_squares);
/// The same as `ordered_sum_cpu` on a GPU. The sums are the CPU's bits. The squares are added as there within blocks
/// and the blocks' sums 1024 at a time: beyond 32 blocks the last places differ from the CPU's. An undefined
/// accumulator: only the squares are wanted.
void ordered_sum_kernel(at::TensorList rows, float scale, bool overwrite, const at::Tensor& accumulator,
                        const at::Tensor& sum_of_squares);
/// Fills the kernel's arguments. `scratch`: (SumArguments::num_scratch(N),) fp64.
kernel::SumArguments sum_arguments(at::TensorList rows, float scale, bool overwrite, const at::Tensor& accumulator,
                                   const at::Tensor& scratch, const at::Tensor& sum_of_squares);

}  // namespace deeptide::numerics::detail
