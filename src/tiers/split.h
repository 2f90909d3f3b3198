// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts flat buffers in two: what stays in one place, and what leaves for another.
#pragma once

#include <cstdint>
#include <vector>

namespace deeptide::tiers {

/// Returns how much of each buffer stays: its first whole blocks, or all. Of each buffer and those before it together a
/// share of `leaving` leaves, to half a block. Units: those of `sizes` and `block`.
std::vector<int64_t> split(const std::vector<int64_t>& sizes, double leaving, int64_t block);

}  // namespace deeptide::tiers
