// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Twin-Flow: which elements of a device's units the host steps, and which the device.
#pragma once

#include <cstdint>
#include <vector>

namespace deeptide::zero {

/// A unit is cut at a multiple of this. Units: elements. 256 KiB of fp32; a divisor of every block that is moved.
inline constexpr int64_t kSplitNumel = int64_t{1} << 16;

/// By unit, how many of its `numels` elements stay on the device: the first ones, whole blocks, or all. The host's
/// share of all elements is `share`, to half a block.
std::vector<int64_t> split_for_host(const std::vector<int64_t>& numels, double share);

}  // namespace deeptide::zero
