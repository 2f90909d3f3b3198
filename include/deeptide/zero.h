// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// zero.Init: models are built without their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "deeptide/export.h"

namespace deeptide::zero {

/// While it lives, tensors of floating types that this thread's operators make on the CPU take no memory: the operators
/// are recorded, and the Engine runs them again, unit by unit, where it binds the parameters. The values have the bits
/// of ordinary construction, and the random generator ends where that would leave it. Scopes nest. Such a model may be
/// copied, tied, cast and written before the Engine exists; its values can be read under torch::NoGradGuard.
/// Units: min_bytes in bytes; smaller tensors are made at once.
class DEEPTIDE_API Init {
 public:
  explicit Init(int64_t min_bytes = 64 << 10);
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

/// Whether the tensor was made under Init and has no memory yet.
DEEPTIDE_API bool is_deferred(const at::Tensor& tensor);
/// Whether operators on the tensor may have to wait for its values: deferred, sharded or published by an engine.
DEEPTIDE_API bool has_deferred_key(const at::Tensor& tensor);
/// Whether the tensor is a parameter that an engine shards (stage 3), or a view of one.
DEEPTIDE_API bool is_sharded(const at::Tensor& tensor);
/// Returns an address that tells the tensor from all others while it is deferred, as data_ptr() would; no memory lies
/// there. Views have theirs within the same range. 0 for other tensors.
DEEPTIDE_API uint64_t address_of(const at::Tensor& tensor);
/// The same for the first byte of a storage.
DEEPTIDE_API uint64_t address_of(const at::Storage& storage);
/// Gives a deferred tensor, and all that share its storage, memory and values; does nothing for others.
DEEPTIDE_API void materialize(const at::Tensor& tensor);

/// Makes a deferred tensor's values from its first element to its last, some at a time; the tensor stays deferred.
class DEEPTIDE_API ValueParts {
 public:
  /// Null if the values cannot be made so: the tensor is not contiguous, or came about by more than draws and
  /// elementwise operators.
  static std::unique_ptr<ValueParts> of(const at::Tensor& tensor);
  ~ValueParts();
  /// Returns the next `count` elements, one-dimensional. count: a multiple of 16, or what is left.
  at::Tensor next(int64_t count);

 private:
  struct Impl;
  explicit ValueParts(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};
/// Gives a deferred tensor these values, of any shape and its type and device, in place of those it would get.
DEEPTIDE_API void replace_values(const at::Tensor& tensor, const at::Tensor& values);

/// Waits until a parameter that a step has published holds its new values (`overlap_publish`): call it before code that
/// reads its memory by address. Operators wait by themselves. Does nothing for other tensors. Errors: CommError.
DEEPTIDE_API void wait_for_values(const at::Tensor& tensor);
/// The same for the parameter in a storage.
DEEPTIDE_API void wait_for_values(const at::Storage& storage);

/// Returns the values of such a tensor, or of a sharded one, in memory of their own.
DEEPTIDE_API at::Tensor values_of(const at::Tensor& tensor);

/// Makes `tensor`, sharded or not, stand for `whole` until it is given its own memory back by set_data.
/// Shapes, types and devices: equal.
DEEPTIDE_API void lend_memory(const at::Tensor& tensor, const at::Tensor& whole);

}  // namespace deeptide::zero
