// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Leaves gradients of weights out of a backward, for another one later: ZB-H1 of arXiv:2401.10241.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_set>
#include <utility>

#include "deeptide/pipeline.h"

namespace deeptide::engine {

/// Parts nodes of autograd that multiply an activation with a weight: in backward they give the activation's gradient
/// alone, and keep what the weight's takes. Torch's own nodes compute both, so the bits are those of one backward.
class WeightsAside {
 public:
  WeightsAside();
  ~WeightsAside();

  /// Whose gradients may wait, from now on.
  void set_weights(const Activations& weights);
  /// Before a backward of `outputs`, whose graph it changes.
  void part(const Activations& outputs);
  /// Returns tensors and gradients: a backward that begins with them computes what backwards since have left.
  std::pair<Activations, Activations> take();

  /// While it lives, segments that this thread records to recompute them are parted as well; null: they are not.
  class Recording {
   public:
    explicit Recording(std::shared_ptr<WeightsAside> aside);
    ~Recording();
    Recording(const Recording&) = delete;

   private:
    std::shared_ptr<WeightsAside> before_;
  };
  /// This thread's, or null.
  static const std::shared_ptr<WeightsAside>& recording();

 private:
  struct Left;
  class Parted;
  class Walk;

  std::unordered_set<const c10::TensorImpl*> weights_;
  std::shared_ptr<Left> left_;
};

}  // namespace deeptide::engine
