// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps that are skipped because a gradient is not finite: whose it is, and what follows from many in a row.
#pragma once

#include <string>
#include <vector>

#include "deeptide/engine.h"
#include "engine/run/losses.h"
#include "engine/run/progress.h"
#include "engine/run/rewind.h"
#include "engine/step/boundary.h"
#include "gradients/reducer.h"

namespace deeptide::engine {

/// Leaves parameters, masters, moments and the schedule unchanged, unless a row of them brings an earlier state back.
class SkippedSteps {
 public:
  /// The parts of the engine that it uses; all outlive it.
  struct Parts {
    const Config& config;
    Channels& channels;
    Boundary& boundary;
    BoundModel& model;
    sharding::Residency& residency;
    gradients::Reducer* reducer;  // null: nothing to train
    Progress& progress;
    Rewind* rewind;  // null: the configuration asks for none
  };
  explicit SkippedSteps(const Parts& parts) : parts_(parts) {}

  /// Collective. Drops the gradients; says in `outcome` whose gradient was bad, in which phase, and the step after
  /// which the state was that was brought back, if it was. The schedule's place then went back too.
  void skip(StepOutcome& outcome, const std::vector<comm::Verdict>& verdicts, const Losses& losses);
  /// The error that the step ends with, on all ranks alike, where too many were skipped in a row; else empty.
  std::string take_error() { return std::exchange(error_, {}); }

 private:
  void blame(StepOutcome& outcome, const std::vector<comm::Verdict>& verdicts, const Losses& losses);
  void act_on_row(StepOutcome& outcome);
  std::string row_text(const StepOutcome& outcome) const;

  Parts parts_;
  std::string error_;
};

}  // namespace deeptide::engine
