// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes a tensor, and looks at its values as bytes.
#include "tiers/spill/spilled_form.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "base/invariant.h"

namespace deeptide::tiers {

using at::Tensor;

SpilledForm::SpilledForm(const Tensor& tensor)
    : sizes_(tensor.sizes().vec()),
      options_(at::TensorOptions().dtype(tensor.dtype()).device(tensor.device())),
      nbytes_(tensor.numel() * static_cast<int64_t>(tensor.itemsize())) {
  DEEPTIDE_INVARIANT(tensor.layout() == at::kStrided, "a strided tensor, not one of layout ", tensor.layout());
  if (tensor.is_non_overlapping_and_dense()) {
    strides_ = tensor.strides().vec();
    return;
  }
  strides_.resize(sizes_.size());
  int64_t stride = 1;
  for (size_t i = sizes_.size(); i-- > 0; stride *= std::max<int64_t>(sizes_[i], 1)) strides_[i] = stride;
}

Tensor SpilledForm::make_with(const at::TensorOptions& options) const {
  return at::empty_strided(sizes_, strides_, options);
}

Tensor SpilledForm::make_on_host() const {
  return make_with(options_.device(at::kCPU).pinned_memory(options_.device().is_cuda()));
}

Tensor SpilledForm::bytes_of(const Tensor& tensor) const {
  Tensor values = tensor.detach().resolve_conj().resolve_neg();
  if (values.strides() != at::IntArrayRef(strides_)) values = values.contiguous();
  return values.as_strided({values.numel()}, {1}).view(at::kByte);
}

}  // namespace deeptide::tiers
