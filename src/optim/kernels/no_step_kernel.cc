// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// In the place of step_kernel.cu where no compiler for a GPU took part in the build.
#include "base/invariant.h"
#include "optim/kernels/step_kernel.h"

namespace deeptide::optim::device_kernels {

bool has_step() { return false; }

void step(const StepArguments& /*arguments*/, void* /*stream*/) {
  DEEPTIDE_INVARIANT(false, "a kernel is called that was not built");
}

}  // namespace deeptide::optim::device_kernels
