// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Twin-Flow: which elements of a device's units the host steps, and which the device.
#pragma once

#include <cstdint>

namespace deeptide::zero {

/// A unit is cut at a multiple of this. Units: elements. 256 KiB of fp32; a divisor of every block that is moved.
inline constexpr int64_t kSplitNumel = int64_t{1} << 16;

/// Cuts one unit after another, so that the host's share of all their elements is `share`, to half a block.
class HostSplit {
 public:
  explicit HostSplit(double share) : share_(share) {}
  /// Of the next unit's `numel` elements, how many stay on the device: the first ones, whole blocks, or all.
  int64_t on_device(int64_t numel);
  int64_t numel() const { return numel_; }
  int64_t numel_on_host() const { return numel_on_host_; }

 private:
  double share_;
  int64_t numel_ = 0, numel_on_host_ = 0;
};

}  // namespace deeptide::zero
