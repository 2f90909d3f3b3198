// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels of LAMB's two passes over a segment. The norms between them are numerics::ordered_squares'.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_arguments.h"
#include "optim/updates/update_scalars.h"

namespace deeptide::optim {

/// All but the gradient and `param` is fp32; all begins at a multiple of 16 bytes.
struct LambArguments {
  LambScalars scalars;
  numerics::kernel::Pieces gradient;  // of the first pass; none: this is the second
  void* master = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* update = nullptr;           // of the first pass: receives the step before learning rate and ratio
  numerics::kernel::Numbers param;  // of the second: bf16 | fp16, receives the rounded master; null: there is none
  int64_t count = 0;
};

/// Built, or absent, like the kernel of the step.
namespace device_kernels {

bool has_lamb();
void lamb(const LambArguments& arguments, void* stream);

}  // namespace device_kernels

namespace host_kernels {

void lamb(const LambArguments& arguments, void* stream);

}  // namespace host_kernels
}  // namespace deeptide::optim
