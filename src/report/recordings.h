// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides when a rank keeps a timeline: as the configuration says, and as `deeptide trace JOB` asks in a running job.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "deeptide/config.h"
#include "report/timeline.h"
#include "trace/recorder.h"

namespace deeptide::report {

/// One rank's. Calls come from the training thread, between two phases.
class Recordings {
 public:
  struct Owner {
    int rank = 0;
    int world = 0;
    std::string clock;  // as Reporting says
  };
  Recordings(const TimelineConfig& config, std::shared_ptr<trace::Recorder> recorder, Owner owner);
  /// Writes what is under way.
  ~Recordings();
  Recordings(const Recordings&) = delete;

  /// `step` has ended. One load if nothing is asked.
  void follow(int64_t step);
  void note_exchange(int64_t step);
  /// Drops what is under way.
  void forget();

 private:
  void begin(std::string folder, int64_t last_step);
  void end();
  void obey(int64_t step);

  const TimelineConfig& config_;
  const std::shared_ptr<trace::Recorder> recorder_;
  const Owner owner_;
  std::unique_ptr<Timeline> timeline_;
  std::string folder_;
  int64_t last_step_ = 0;
  uint64_t seen_ = 0;  // the launcher's last request
};

}  // namespace deeptide::report
