// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel that copies many small tensors in one launch, with cast.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_arguments.h"

namespace deeptide::numerics::kernel {

struct CopyArguments {
  static constexpr int kMost = 64;
  Numbers from[kMost];
  Numbers to[kMost];
  /// Each pair's first element among all of them, ascending; then their number.
  int64_t begin[kMost + 1] = {};
  int pairs = 0;
};

}  // namespace deeptide::numerics::kernel

/// Built by nvcc or hipcc, or absent. Errors: std::runtime_error when the device refuses a launch.
namespace deeptide::numerics::device_kernels {

/// Whether there is a kernel for the current device.
bool has_copy();
/// `stream`: the current device's, by its own handle.
void copy(const kernel::CopyArguments& arguments, void* stream);

}  // namespace deeptide::numerics::device_kernels

/// The same bodies, compiled for the host by a test.
namespace deeptide::numerics::host_kernels {

void copy(const kernel::CopyArguments& arguments, void* stream);

}  // namespace deeptide::numerics::host_kernels
