// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of an optimizer's step: sums and scales the gradient, decays, updates and rounds, in one pass over a
// segment.
#pragma once

#include <cstdint>

#include "numerics/kernels/kernel_arguments.h"
#include "optim/updates/update_scalars.h"

namespace deeptide::optim {

struct StepArguments {
  static constexpr int kMostStates = 3;
  UpdateScalars update;
  numerics::kernel::Rows gradient;
  numerics::kernel::Pieces pieces;  // the gradient instead, if there are any: where packets may carry all else
  float gradient_scale = 1.0f;      // the step's own: loss scale and clipping
  numerics::kernel::Numbers master;
  numerics::kernel::Numbers states[kMostStates];  // by the rule's roles; null if not kept
  numerics::kernel::Numbers param;                // receives the rounded master; null: the master is the parameter
  int64_t count = 0;
  void* low = nullptr;       // of a packed master, whose upper halves are `master`
  uint8_t* above = nullptr;  // a bit for each of its elements: numerics::HalfwayBits
  bool rounds = false;       // states in bf16, stochastically
  numerics::kernel::RandomBits random;

  /// Whether it must be such that eight elements may be stepped at a time.
  bool needs_packets() const { return low != nullptr || rounds; }
  /// Whether all but the gradient, which has this type, is such.
  bool takes_packets(numerics::kernel::NumberType gradient_type) const {
    using numerics::kernel::NumberType;
    const NumberType master_type = low != nullptr ? NumberType::bf16 : NumberType::fp32;
    const NumberType state_type = rounds ? NumberType::bf16 : NumberType::fp32;
    bool may = master.type == master_type && numerics::kernel::is_aligned(master.data) &&
               numerics::kernel::is_aligned(param.data) && numerics::kernel::is_aligned(low);
    for (const auto& state : states) {
      may = may && (state.data == nullptr || (state.type == state_type && numerics::kernel::is_aligned(state.data)));
    }
    if (gradient_type == NumberType::fp32) return may && (param.data == nullptr || param.type != NumberType::fp32);
    // There are few kernels for packed masters and states in bf16, since each takes a compiler its time.
    if (needs_packets() && gradient_type != NumberType::bf16) return false;
    return may && (low != nullptr || (param.data != nullptr && gradient_type == param.type));
  }
};

/// Built by nvcc or hipcc, or absent. Errors: std::runtime_error when the device refuses a launch.
namespace device_kernels {

/// Whether there is a kernel for the current device.
bool has_step();
/// `stream`: the current device's, by its own handle.
void step(const StepArguments& arguments, void* stream);

}  // namespace device_kernels

/// The same bodies, compiled for the host by a test.
namespace host_kernels {

void step(const StepArguments& arguments, void* stream);

}  // namespace host_kernels
}  // namespace deeptide::optim
