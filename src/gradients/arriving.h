// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A gradient on its way into a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include "sharding/unit.h"

namespace deeptide::gradients {

/// The factors of a gradient (N, M), which is left @ right. Shapes: (N, K) and (K, M).
struct Product {
  at::Tensor left, right;
};

/// A tensor, or a product that is computed where it goes: without memory of its own, and without a pass to add it.
/// Refers to what it is made of, and takes no reference that would count: see HeldGradients::may_hold.
class Arriving {
 public:
  Arriving(const at::Tensor& gradient) : whole_(&gradient) {}  // NOLINT: one of its forms
  Arriving(const Product& product) : product_(&product) {}     // NOLINT: likewise
  Arriving(const Arriving&) = delete;

  /// Errors: ValueError naming the parameter, for a gradient of a layout that no bucket takes.
  void check(const sharding::Parameter& parameter) const;
  /// The gradient as a tensor; computes it the first time.
  const at::Tensor& whole();
  /// Writes it to its place in the bucket, with cast.
  void copy_into(const at::Tensor& bucket, const sharding::Parameter& parameter);
  /// Adds it to its place in the bucket: the bits are those of a product that is computed first.
  void add_into(const at::Tensor& bucket, const sharding::Parameter& parameter);

 private:
  /// Whether the product can be computed in the place.
  bool fits(const at::Tensor& place) const;

  const at::Tensor* whole_ = nullptr;  // null: the product's is not computed yet
  const Product* product_ = nullptr;
  at::Tensor computed_;
};

/// Errors: ValueError naming the parameter, for a gradient of a layout that no bucket takes.
void check_layout(const sharding::Parameter& parameter, const at::Tensor& gradient);

/// Whether this machine's product that adds to `place` (N, M) gives the bits of one that is computed first. It does
/// where the library sums over all of K before it adds. Tried once for each shape, layout and number of threads, on
/// numbers of its own, with three times the memory of `place`.
bool adds_alike(const at::Tensor& place, const Product& product);

}  // namespace deeptide::gradients
