// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors as kernels take them: their memory, their type, their device's stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "numerics/kernels/kernel_arguments.h"

namespace deeptide::numerics {

namespace detail {

/// Whether `has_kernel`, a question of the current device, is true on this one. Asked once per device of CUDA and ROCm,
/// which torch calls CUDA too.
bool has_kernel_on(at::Device device, bool (*has_kernel)());
/// Whether another device brings kernels of its own: by operators deeptide_kernels::available() -> bool, and one per
/// kernel, name(int arguments) -> (), which is given the address of the arguments.
bool brings_kernels(at::Device device);
/// Calls that operator.
void run_brought(const char* name, const void* arguments);
/// Calls `launch(stream)` with this device current and its stream of the moment.
void launch_on(at::Device device, c10::function_ref<void(void* stream)> launch);

}  // namespace detail

/// A kernel, on devices that have it.
template <typename Arguments>
struct Kernel {
  const char* name;
  bool (*is_there)();  // on the current device
  void (*start)(const Arguments& arguments, void* stream);

  bool is_on(at::Device device) const {
    return detail::has_kernel_on(device, is_there) || detail::brings_kernels(device);
  }
  /// On the device's stream of the moment.
  void run(at::Device device, const Arguments& arguments) const {
    if (!device.is_cuda()) return detail::run_brought(name, &arguments);
    detail::launch_on(device, [&](void* stream) { start(arguments, stream); });
  }
};

/// Shape: (N,) contiguous, fp32|bf16|fp16; undefined: none.
kernel::Numbers numbers_of(const at::Tensor& tensor);
/// The same of a tensor that the kernel does not write.
kernel::Numbers read_numbers_of(const at::Tensor& tensor);

/// Shapes: one row per rank, as a Contributions has them; at most kernel::Rows::kMost.
kernel::Rows rows_of(at::TensorList rows, float scale);

}  // namespace deeptide::numerics
