// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hides the engine's work in the midst of a user's operator from the user's program.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace deeptide::device {

/// While it lives, no dispatch mode, tracer, functionalization or transform of this thread sees operators; RAII.
/// Otherwise a traced program would hold our copies, and a fake-tensor mode would make our buffers fake.
class Unseen {
 public:
  Unseen() = default;

 private:
  static constexpr c10::DispatchKeySet kSeers =
      c10::python_ks | c10::functorch_transforms_ks |
      c10::DispatchKeySet({c10::DispatchKey::Tracer, c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch,
                           c10::DispatchKey::PythonDispatcher});
  c10::impl::ExcludeDispatchKeyGuard guard_{kSeers};
};

}  // namespace deeptide::device
