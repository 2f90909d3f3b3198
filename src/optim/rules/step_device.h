// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A segment as the kernels of optimizers' steps take it.
#pragma once

#include "optim/kernels/lamb_kernel.h"
#include "optim/kernels/step_kernel.h"
#include "optim/rules/two_pass_rule.h"

namespace deeptide::optim::detail {

/// Whether a kernel steps this segment. Not where ranks are too many, nor where a packed master or states in bf16 lie
/// such that packets cannot take them: ATen's operators do.
bool has_step_kernel(const Segment& segment);

/// Whether the kernel takes the segment's gradient as it lies: in pieces, or as rows beside states or a master that
/// only packets take.
bool takes_gradient(const Segment& segment);
/// The gradient in new memory, one step nearer to what the kernel takes.
numerics::Contributions nearer_gradient(const numerics::Contributions& gradient);

/// Fills the kernel's arguments.
StepArguments step_arguments(const Segment& segment, const StepTerms& terms, const UpdateScalars& update);

/// The bits of `Rule::step` on a CPU whose vectors fuse multiply-adds.
void step_by_kernel(const Segment& segment, const StepTerms& terms, const UpdateScalars& update);

/// Whether kernels do both passes over this segment, whose first states are exp_avg and exp_avg_sq.
bool has_lamb_kernel(const Segment& segment);

/// Do what NormRule::measure and NormRule::apply do, by one kernel each and the sums of squares between them. The bits
/// of a CPU whose vectors fuse multiply-adds, but for the order in which squares are added.
void lamb_measure_by_kernel(const Segment& segment, const LambScalars& scalars, int64_t first, NormSums& sums);
void lamb_apply_by_kernel(const Segment& segment, const LambScalars& scalars);

/// Their arguments, for tests. `update`: undefined in the second pass.
LambArguments lamb_arguments(const Segment& segment, const LambScalars& scalars, const at::Tensor& update);

}  // namespace deeptide::optim::detail
