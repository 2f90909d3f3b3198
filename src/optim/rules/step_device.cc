// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands a segment's memory to the kernel of a step.
#include "optim/rules/step_device.h"

#include "base/invariant.h"
#include "numerics/kernels/kernel_tensors.h"
#include "numerics/sums/kernel_pieces.h"

namespace deeptide::optim::detail {

using numerics::kernel::Rows;

namespace {

constexpr numerics::Kernel<StepArguments> kStep{"step", &device_kernels::has_step, &device_kernels::step};

/// All but the gradient.
StepArguments of_states(const Segment& segment) {
  StepArguments made;
  made.master = numerics::numbers_of(segment.master);
  DEEPTIDE_INVARIANT(segment.states.size() <= StepArguments::kMostStates, "a rule has too many states for a kernel");
  for (size_t i = 0; i < segment.states.size(); ++i) made.states[i] = numerics::numbers_of(segment.states[i]);
  made.param = numerics::numbers_of(segment.param);
  made.count = segment.master.numel();
  return made;
}

}  // namespace

bool has_step_kernel(const Segment& segment) {
  return segment.master.defined() && !segment.low.defined() && !segment.rounding &&
         segment.gradient.rows.size() <= Rows::kMost && kStep.is_on(segment.master.device());
}

bool takes_pieces(const Segment& segment) {
  const numerics::Contributions& gradient = segment.gradient;
  if (gradient.pieces.empty() || !numerics::fit_kernels(gradient)) return false;
  return of_states(segment).takes_packets(numerics::pieces_of(gradient).type);
}

StepArguments step_arguments(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  StepArguments made = of_states(segment);
  made.update = update;
  if (segment.gradient.pieces.empty()) {
    made.gradient = numerics::rows_of(segment.gradient.rows, static_cast<float>(segment.gradient.scale));
  } else {
    made.pieces = numerics::pieces_of(segment.gradient);
  }
  made.gradient_scale = static_cast<float>(terms.gradient_scale);
  return made;
}

void step_by_kernel(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  kStep.run(segment.master.device(), step_arguments(segment, terms, update));
}

}  // namespace deeptide::optim::detail
