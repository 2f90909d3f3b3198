// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Refuses what does not go together: one table of features, texts and cures.
#pragma once

#include "deeptide/config.h"
#include "engine/design/model_facts.h"
#include "engine/design/topology.h"
#include "optim/rules/rule.h"

namespace deeptide::engine {

/// Errors: ConfigError with the text and the cure of the first row of the table whose features are all asked for.
/// `rule`: null: nothing is trained.
void refuse(const Config& config, const ModelFacts& model, const optim::Rule* rule);

/// The same for units on axes of their own, and stages of a pipeline. `steps_whole`: the caller's optimizer needs whole
/// parameters. Errors: likewise.
void refuse_axes(const Config& config, const Topology& topology, const optim::Rule* rule, bool steps_whole);

/// The result of a design, before it may be built.
struct Outcome {
  bool steps_shard = true;       // each rank steps at most its slice
  double gradients_share = 0.0;  // of those that a placement of their own takes off the device
  double states_share = 0.0;     // of those that the host steps for a device
  bool states_in_files = false;
};
/// Errors: likewise.
void refuse(const Config& config, const ModelFacts& model, const optim::Rule& rule, const Outcome& outcome);

}  // namespace deeptide::engine
