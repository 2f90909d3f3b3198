// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Pieces of a sum as kernels take them.
#pragma once

#include "numerics/kernels/kernel_tensors.h"
#include "numerics/sums/ordered_sum.h"

namespace deeptide::numerics {

/// Whether kernels take these pieces: at most kernel::Pieces::kMost, and each begins where packets do.
bool fit_kernels(const Contributions& contributions);
kernel::Pieces pieces_of(const Contributions& contributions);

}  // namespace deeptide::numerics
