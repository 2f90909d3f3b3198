// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The losses of one rank since its last step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/run/progress.h"

namespace deeptide::engine {

/// Holds those that engine.backward() got. To read one is to wait for the device.
class Losses {
 public:
  /// A copy: the program may add to its tensor later.
  void note(const at::Tensor& loss) { since_.push_back(loss.detach().clone()); }
  void clear() { since_.clear(); }
  /// NaN: there is none.
  double mean() const;
  bool are_finite() const;

  /// Sets what the first mean after a load is compared with; NaN: nothing.
  void expect(double loss) { expected_ = loss; }
  /// Compares, once: the next call goes on with the same gradients. `tolerance`: a share of what is expected. Errors:
  /// CheckpointError.
  void check_first(double tolerance);

 private:
  std::vector<at::Tensor> since_;
  double expected_ = kNoLoss;
};

}  // namespace deeptide::engine
