// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A unit's gradients where autograd left them: at one rank nothing travels, and kernels take them as pieces.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "device/lane.h"
#include "device/memory/memory.h"
#include "numerics/sums/ordered_sum.h"
#include "sharding/unit.h"

namespace deeptide::gradients {

/// Counted in the ledger as the bucket that they save. Dropped by the host once all work that reads them is issued.
class HeldGradients {
 public:
  HeldGradients(std::shared_ptr<device::Ledger> ledger, const sharding::Unit& unit, at::ScalarType dtype,
                at::Device device);
  ~HeldGradients();
  HeldGradients(const HeldGradients&) = delete;
  HeldGradients& operator=(const HeldGradients&) = delete;

  /// Whether a gradient, which a hook has handed on, may stay where it is: dense memory of its own, in the type of
  /// buckets, that the program has not kept as `.grad`.
  static bool may_hold(const at::Tensor& gradient, const sharding::Parameter& parameter, at::ScalarType dtype);
  void add(int parameter, const at::Tensor& gradient);
  /// The unit's gradient so far; none: all of it is zero.
  std::vector<numerics::Piece> pieces() const;
  /// The same in one new bucket, as of those that are there; what is between them is undefined.
  void copy_into(const at::Tensor& bucket) const;

 private:
  const std::shared_ptr<device::Ledger> ledger_;
  const sharding::Unit& unit_;
  const int64_t bytes_;
  const device::Lane home_;            // on which their memory was taken, and goes back
  std::vector<at::Tensor> gradients_;  // by parameter, flat; undefined: none yet
};

}  // namespace deeptide::gradients
