// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A unit's gradient as a step reads it: block by block, wherever it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device/lane.h"
#include "numerics/sums/ordered_sum.h"
#include "tiers/buffer.h"

namespace deeptide::gradients {

/// Elements of a device's sum that leave for the host's memory.
struct CpuPart {
  static constexpr int64_t kBlock = int64_t{1} << 20;  // elements that leave by one copy: 4 MiB of fp32

  /// Waits for these elements, counted from the part's beginning. Shapes: (count,).
  at::Tensor read(tiers::Block block) const;

  at::Tensor values;                  // (N,) page-locked
  std::vector<device::Mark> arrived;  // by block; none: nothing has left yet
};

/// (N,) elements, contributed by the ranks or summed already.
class UnitGradient {
 public:
  UnitGradient() = default;                                                                // none
  UnitGradient(numerics::Contributions contributions) : rows(std::move(contributions)) {}  // NOLINT: one of its forms
  UnitGradient(at::Tensor sum) : rows(std::move(sum)) {}                                   // NOLINT: likewise
  /// Sums that lie in memory are a contribution; others need leases.
  explicit UnitGradient(const tiers::Buffer& buffer) {
    if (const at::Tensor flat = buffer.in_place(); flat.defined()) {
      rows = flat;
    } else {
      sums = buffer;
    }
  }
  /// A device's sum: its first elements (M,), M >= 0, and what leaves.
  UnitGradient(at::Tensor stays, std::shared_ptr<const CpuPart> leaves)
      : rows(std::move(stays)), on_host(std::move(leaves)) {}

  bool defined() const { return rows.defined() || sums.defined(); }
  /// (N,) fp32: where it lies if that is one fp32 tensor in memory, otherwise new memory; of a device's sum, on it.
  at::Tensor sum() const;
  /// Likewise, but on the host if all of a device's sum has left.
  at::Tensor sum_where_stepped() const;
  /// Elements of one block of `sums`, or of `rows`, valid while `lease` lives.
  numerics::Contributions part(tiers::Block block, tiers::Lease& lease) const {
    if (!sums.defined()) return rows.narrow(block.begin, block.count);
    lease = sums.lease(block, tiers::Access::read);
    return lease.tensor();
  }

  numerics::Contributions rows;            // none if `sums` is defined; a device's at one rank may be pieces
  tiers::Buffer sums;                      // in files
  std::shared_ptr<const CpuPart> on_host;  // behind `rows`; null: nothing leaves
};

}  // namespace deeptide::gradients
