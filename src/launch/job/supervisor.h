// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A job on this machine: carries its ranks' output, and ends all ranks when one fails or the user stops the job.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/output/failure_report.h"
#include "launch/output/job_output.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/process_group.h"
#include "launch/system/signal_file.h"
#include "launch/watch/hang_watch.h"
#include "launch/watch/host_watch.h"
#include "launch/wire/hub_link.h"
#include "launch/wire/rank_hub.h"

namespace deeptide::launch {

class Supervisor {
 public:
  /// `keeper`: the parent that the user knows the job by (see run_kept_job); 0: this process is that.
  explicit Supervisor(const Options& options, pid_t keeper = 0);

  /// Runs all plans to their end; `what` names the job in its first line. Returns the exit code to pass on: that of the
  /// first rank that failed, 128 + signal if a signal stopped the launcher, 0 if all ranks succeeded.
  /// Errors: std::system_error if a rank cannot be started; none is left running then.
  int run(const std::vector<RankPlan>& plans, const std::string& what);

  /// The same for a starter of ranks, named `name` in reports; its ranks connect to `hub`.
  int run_program(const Command& command, const std::string& name, RankHub& hub);

  /// Leaves the report of hangs to the launcher at `hub` (see kHubVariable) while there is a connection to it.
  void report_to(const std::string& hub, const std::string& token, const std::string& hello);

  /// The signal that asked this process to stop, if one did.
  const std::optional<int>& stop_signal() const { return stop_signal_; }

 private:
  Terminal add_output(int id, const std::string& prefix);
  int finish();
  void supervise();
  void on_signal(int signal);
  void on_late(double waited_s);
  void on_link_changed();
  void on_exit(const ProcessGroup::Member& member);
  bool is_asked_to_end();
  size_t num_running() const;

  Options options_;
  pid_t keeper_;
  SignalFile signals_;
  Terminal terminal_;
  JobOutput output_;
  FailureReport failures_;
  ProcessGroup ranks_;
  HostWatch host_watch_;
  HangWatch watch_;
  std::string program_;             // empty: ranks
  RankHub* hub_ = nullptr;          // of a starter's ranks
  std::optional<HubLink> link_;     // of a starter's rank
  double late_s_ = 0.0;             // the wait that has reached the timeout
  std::optional<int> stop_signal_;  // that the launcher received
};

}  // namespace deeptide::launch
