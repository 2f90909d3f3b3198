// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides which tensors our own kernels may take; torch's operators take all others.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace deeptide::ops {

/// Whether it has values of its own: no subclass, fake or transform's wrapper.
inline bool plain(const at::Tensor& tensor) {
  constexpr auto kWrapped = c10::python_ks | c10::functorch_transforms_ks |
                            c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::Negative});
  return !tensor.is_meta() && tensor.layout() == at::kStrided && !tensor.key_set().has_any(kWrapped);
}

/// Whether its values lie in CPU memory and may be read.
inline bool readable(const at::Tensor& tensor) { return tensor.is_cpu() && plain(tensor); }

/// Whether it is a plain fp32 or bf16 tensor on any device, without autocast.
inline bool plain_float(const at::Tensor& tensor) {
  return plain(tensor) && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16) &&
         !at::autocast::is_autocast_enabled(tensor.device().type());
}

/// Whether it is a readable fp32 or bf16 tensor, without autocast.
inline bool fast_path(const at::Tensor& tensor) { return tensor.is_cpu() && plain_float(tensor); }

}  // namespace deeptide::ops
