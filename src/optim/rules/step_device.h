// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A segment as the kernel of an optimizer's step takes it.
#pragma once

#include "optim/rules/rule.h"
#include "optim/updates/step_kernel.h"

namespace deeptide::optim::detail {

/// Whether a kernel steps this segment. Not where a master is packed, states are rounded stochastically, or ranks are
/// too many: ATen's operators do.
bool has_step_kernel(const Segment& segment);

/// Whether the kernel takes the segment's gradient in pieces, if it lies so.
bool takes_pieces(const Segment& segment);

/// Fills the kernel's arguments.
StepArguments step_arguments(const Segment& segment, const StepTerms& terms, const UpdateScalars& update);

/// The bits of `Rule::step` on a CPU whose vectors fuse multiply-adds.
void step_by_kernel(const Segment& segment, const StepTerms& terms, const UpdateScalars& update);

}  // namespace deeptide::optim::detail
