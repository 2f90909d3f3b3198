// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A tensor without its values, and its values without the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace deeptide::tiers {

/// Sizes, strides, type and device of a tensor whose values lie elsewhere. Strides are kept where its values have
/// neither gaps nor overlaps; else a copy is contiguous.
class SpilledForm {
 public:
  explicit SpilledForm(const at::Tensor& tensor);

  /// Bytes of the values.
  int64_t nbytes() const { return nbytes_; }
  /// A tensor of this form, of any values: where the tensor was, or on the host.
  at::Tensor make() const { return make_with(options_); }
  at::Tensor make_on_host() const;
  /// The values (nbytes,) of a tensor of this form in the order in which they lie; of one with gaps, of a copy.
  at::Tensor bytes_of(const at::Tensor& tensor) const;

 private:
  at::Tensor make_with(const at::TensorOptions& options) const;

  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::TensorOptions options_;
  int64_t nbytes_ = 0;
};

}  // namespace deeptide::tiers
