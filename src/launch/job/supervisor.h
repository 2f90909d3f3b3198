// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a job on this machine: forwards the ranks' output, and ends all ranks when one fails or the user stops the job.
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
  /// `keeper`: the parent by which the user knows the job (see run_kept_job); 0: the user knows this process.
  explicit Supervisor(const Options& options, pid_t keeper = 0);

  /// Runs all plans to their end; `what` describes the job in its first line. Returns the exit code of the first rank
  /// that failed; if a signal stopped the launcher, the ranks' own (OwnEnd), or 128 + signal; or 0 if all ranks
  /// succeeded. Errors: std::system_error if a rank cannot be started; no rank is left running then.
  int run(const std::vector<RankPlan>& plans, const std::string& what);

  /// Does as run for a starter of ranks, which reports call `name`; its ranks connect to `hub`.
  int run_program(const Command& command, const std::string& name, RankHub& hub);

  /// Leaves hang reports to the launcher at `hub` (see kHubVariable) while the connection lasts.
  void report_to(const std::string& hub, const std::string& token, const std::string& hello);

  /// The signal that asked this process to stop, if one did.
  const std::optional<int>& stop_signal() const { return stop_signal_; }

 private:
  Terminal add_output(int id, const std::string& prefix);
  int finish();
  int stopped_code() const;
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
  std::string program_;             // name of the starter; empty: runs ranks
  RankHub* hub_ = nullptr;          // for a starter's ranks
  std::optional<HubLink> link_;     // in a starter's rank
  double late_s_ = 0.0;             // the wait that has reached the timeout
  std::optional<int> stop_signal_;  // received by the launcher
  Clock::time_point stopped_at_;    // when it came
};

}  // namespace deeptide::launch
