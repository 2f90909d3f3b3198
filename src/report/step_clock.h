// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adds up how a rank spends its time.
#pragma once

#include "deeptide/reports.h"
#include "trace/recorder.h"

namespace deeptide::report {

/// Listens to spans of the training thread that follow each other: waits, files, the optimizer, phases.
class StepClock : public trace::Sink {
 public:
  void begin(const trace::SpanRecord& span) noexcept override;
  void end(const trace::SpanRecord& span) noexcept override;
  /// The times that have ended since the last call. Call it between two phases.
  StepTimes take();

 private:
  StepTimes times_;
  StepTimes
      between_;  // waits and files of a phase that may yet turn out to be forward: a save's are no part of a step's
  double before_optimizer_ = 0.0;  // waits and files when its span began
};

}  // namespace deeptide::report
