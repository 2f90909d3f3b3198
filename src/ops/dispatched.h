// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Our operators by way of the dispatcher, where the gate makes sharded arguments whole.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace deeptide::ops {

/// The operator `name`, such as "deeptide::linear", defined with a function of the type Kernel. For a static: finding
/// it takes a lock.
template <typename Kernel>
c10::TypedOperatorHandle<Kernel> dispatched(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Kernel>();
}

}  // namespace deeptide::ops
