// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors as kernels take them: their memory, their type, their device's stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "numerics/kernels/kernel_arguments.h"

namespace deeptide::numerics {

/// Whether `has_kernel`, a question of the current device, is true on this one. Asked once per device. Only GPUs of
/// CUDA and ROCm, which torch calls CUDA too, have kernels.
bool has_kernel_on(at::Device device, bool (*has_kernel)());

/// Calls `launch(stream)` with this device current and its stream of the moment.
void launch_on(at::Device device, c10::function_ref<void(void* stream)> launch);

/// Shape: (N,) contiguous, fp32|bf16|fp16; undefined: none.
kernel::Numbers numbers_of(const at::Tensor& tensor);
/// The same of a tensor that the kernel does not write.
kernel::Numbers read_numbers_of(const at::Tensor& tensor);

/// Shapes: one row per rank, as a Contributions has them; at most kernel::Rows::kMost.
kernel::Rows rows_of(at::TensorList rows, float scale);

}  // namespace deeptide::numerics
