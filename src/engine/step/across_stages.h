// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets the stages of a pipeline act alike in a step: one norm, one verdict, one name for what is bad.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "engine/bind/stages.h"
#include "engine/run/progress.h"

namespace deeptide::engine {

/// Collective over the mesh. Errors: ValueError, on all ranks, if no stage has a trained parameter, though `trained_by`
/// configures an optimizer. `num_trained`: elements of this stage's.
void check_stages_train(Stages& stages, int64_t num_trained, const std::string& trained_by);

/// Figures that all ranks of a stage have alike at a step's end.
struct StageTotals {
  double squares = 0.0;   // of its gradients
  double loss = kNoLoss;  // the mean; of stages that compute one
};

/// Collective over the mesh. Sums the squares in the stages' order: each element counts once, since one stage holds it.
/// The loss is that of the last stage that has one.
StageTotals over_stages(Stages& stages, const StageTotals& own);

/// Collective over the mesh, in a step whose gradients are not all finite. Gives every rank the parameter, the rank and
/// the phase that the last of the stages with a bad gradient found: backward carries what is bad from there on.
void agree_on_blame(Stages& stages, StepOutcome& outcome);

/// Collective over the mesh. Whether `failed` is true on a rank of any stage; each gives its team's answer.
bool any_stage(Stages& stages, bool failed, const char* what);

/// Collective over the mesh. Every stage's text, of any length, in the stages' order.
std::vector<std::string> texts_of_stages(Stages& stages, const std::string& own, const char* what);

/// Collective over the mesh. Leaves out the buffers that a later stage has too, as it has those of modules without
/// parameters: it runs more of the program, and saves them.
void leave_to_later_stages(Stages& stages, std::vector<NamedTensor>& buffers);

}  // namespace deeptide::engine
