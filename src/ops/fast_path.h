// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides which tensors our own kernels may take; torch's operators take all others.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace deeptide::ops {

/// Whether its values lie in CPU memory and may be read: no subclass, fake or transform's wrapper.
inline bool readable(const at::Tensor& tensor) {
  constexpr auto kWrapped = c10::python_ks | c10::functorch_transforms_ks |
                            c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::Negative});
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.key_set().has_any(kWrapped);
}

/// Whether it is a readable fp32 or bf16 tensor, without autocast.
inline bool fast_path(const at::Tensor& tensor) {
  return readable(tensor) && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16) &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

}  // namespace deeptide::ops
