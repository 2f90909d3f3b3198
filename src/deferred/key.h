// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The extra dispatch key of tensors whose values are elsewhere: sharded over ranks, or not made yet.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace deeptide::deferred {

/// The only dispatch key without kernels of its own. sharding/gate.cc registers its fallback.
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

/// Gives or takes the key. Views that exist already keep what they have.
inline void set_key(const at::Tensor& tensor, bool on) {
  struct Keys : c10::TensorImpl {  // the key set is a protected member
    static c10::DispatchKeySet& of(c10::TensorImpl& impl) { return impl.*(&Keys::key_set_); }
  };
  auto& keys = Keys::of(*tensor.unsafeGetTensorImpl());
  keys = on ? keys.add(kKey) : keys.remove(kKey);
}

inline bool has_key(const at::Tensor& tensor) { return tensor.key_set().has(kKey); }

}  // namespace deeptide::deferred
