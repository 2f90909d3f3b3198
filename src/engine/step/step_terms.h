// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Before a step, what ranks may see differently and must do alike: hyper-parameters, and which parameters move.
#pragma once

#include <vector>

#include "comm/messages.h"
#include "engine/bind/channels.h"
#include "engine/bind/live_model.h"
#include "engine/run/progress.h"
#include "engine/step/boundary.h"
#include "gradients/reducer.h"
#include "zero/states/optimizer_states.h"
#include "zero/states/step_counts.h"

namespace deeptide::engine {

/// Collective, as a step is: all ranks call the same functions after their verdicts were exchanged.
class StepTerms {
 public:
  /// `reducer`: null if there is nothing to train, and then nothing is called.
  StepTerms(Channels& channels, Boundary& boundary, LiveModel& live, gradients::Reducer* reducer, Progress& progress)
      : channels_(channels), boundary_(boundary), live_(live), reducer_(reducer), progress_(progress) {}

  /// All ranks step with the hyper-parameters of the first rank that still trains: shards of one tensor must not move
  /// at different rates. Returns whether ranks had different ones; says so once.
  bool follow_leader(const std::vector<comm::Verdict>& verdicts, const std::vector<comm::Close>& closes);
  /// Finds the parameters that backward reached on any rank. The others are left alone, as torch leaves a parameter
  /// whose .grad is None: no decay, no momentum, no count of the step.
  zero::ActiveParameters agree_on_active(const std::vector<comm::Verdict>& verdicts,
                                         const std::vector<sharding::Unit*>& trainable);

 private:
  void warn_of_difference(const std::vector<double>& values, const std::vector<comm::Close>& closes);

  Channels& channels_;
  Boundary& boundary_;
  LiveModel& live_;
  gradients::Reducer* reducer_;
  Progress& progress_;
  bool told_of_difference_ = false;
  std::vector<std::vector<bool>> reached_;  // by the last step that left parameters alone
};

}  // namespace deeptide::engine
