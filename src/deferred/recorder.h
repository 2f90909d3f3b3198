// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records operators instead of running them: models are built without their memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

#include "deferred/key.h"

namespace deeptide::deferred {

/// Results that take fewer bytes are made at once: they cost less than their record, and models read them.
inline constexpr int64_t kMinBytes = 64 << 10;

/// While it lives, what this thread's operators make on the CPU in floating types is deferred. Scopes nest. Copies of
/// what is deferred are too, on any device and after the scope.
class Scope {
 public:
  explicit Scope(int64_t min_bytes = kMinBytes);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_{kKey};
  int64_t min_bytes_before_;
};

/// While it lives, scopes around it have no effect: for the engine's own tensors.
using Pause = c10::impl::ExcludeDispatchKeyGuard;

/// Called for each operator that reaches the fallback of `kKey`. Returns true if the results are on the stack; false if
/// the operator is none of the recorder's, or may run now, with the values of deferred arguments put in their place.
bool record(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack);

}  // namespace deeptide::deferred
