// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A unit's gradient as a step reads it: block by block, wherever it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "numerics/ordered_sum.h"
#include "tiers/buffer.h"

namespace deeptide::gradients {

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

  bool defined() const { return !rows.rows.empty() || sums.defined(); }
  /// (N,) fp32: where it lies if that is one fp32 tensor in memory, otherwise new memory.
  at::Tensor sum() const { return sums.defined() ? sums.copy().to(at::kFloat) : rows.sum(); }
  /// Elements of one block of `sums`, valid while `lease` lives.
  numerics::Contributions part(tiers::Block block, tiers::Lease& lease) const {
    if (!sums.defined()) return rows.narrow(block.begin, block.count);
    lease = sums.lease(block, tiers::Access::read);
    return lease.tensor();
  }

  numerics::Contributions rows;  // none if `sums` is defined
  tiers::Buffer sums;            // in files
};

}  // namespace deeptide::gradients
