// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands a segment's memory to the kernel of a step.
#include "optim/rules/step_device.h"

#include "base/invariant.h"
#include "numerics/kernels/kernel_tensors.h"

namespace deeptide::optim::detail {

using numerics::kernel::Rows;

bool has_step_kernel(const Segment& segment) {
  return segment.master.defined() && !segment.low.defined() && !segment.rounding &&
         segment.gradient.rows.size() <= Rows::kMost &&
         numerics::has_kernel_on(segment.master.device(), &device_kernels::has_step);
}

StepArguments step_arguments(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  StepArguments made;
  made.update = update;
  made.gradient = numerics::rows_of(segment.gradient.rows, static_cast<float>(segment.gradient.scale));
  made.gradient_scale = static_cast<float>(terms.gradient_scale);
  made.master = numerics::numbers_of(segment.master);
  DEEPTIDE_INVARIANT(segment.states.size() <= StepArguments::kMostStates, "a rule has too many states for a kernel");
  for (size_t i = 0; i < segment.states.size(); ++i) made.states[i] = numerics::numbers_of(segment.states[i]);
  made.param = numerics::numbers_of(segment.param);
  made.count = segment.master.numel();
  return made;
}

void step_by_kernel(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  const StepArguments arguments = step_arguments(segment, terms, update);
  numerics::launch_on(segment.master.device(), [&](void* stream) { device_kernels::step(arguments, stream); });
}

}  // namespace deeptide::optim::detail
