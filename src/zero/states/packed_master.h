// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A master whose upper half is the bf16 parameter: a buffer of fp32 to whoever leases it.
#pragma once

#include <memory>

#include "numerics/rounding/packed.h"
#include "tiers/buffer.h"

namespace deeptide::zero {

/// The bits of a packed master beside its parameters (numel,) in bf16.
struct PackedMaster {
  tiers::Buffer low;  // (numel,) int16; zero: the master is the parameter
  std::shared_ptr<numerics::HalfwayBits> halfway;
};

/// The master as fp32, block by block: a lease unpacks it into memory of its own; one that writes packs it again when
/// it ends, and so writes the parameters too.
tiers::Buffer packed_buffer(tiers::Buffer parameters, PackedMaster master);

}  // namespace deeptide::zero
