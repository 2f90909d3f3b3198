// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Calls our operators through the dispatcher, where the gate makes sharded arguments whole.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace deeptide::ops {

/// Returns the operator `name`, such as "deeptide::linear", defined with a function of type Kernel. Keep it in a
/// static: the lookup takes a lock.
template <typename Kernel>
c10::TypedOperatorHandle<Kernel> dispatched(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Kernel>();
}

}  // namespace deeptide::ops
