// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts the ranks, carries their output, and ends them all when one fails or the user says so.
#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/options.h"
#include "launch/orphan_guard.h"
#include "launch/output.h"
#include "launch/rank_plan.h"
#include "launch/rank_process.h"

namespace deeptide::launch {

/// One job on this machine: running, then stopping (asked to end, within the grace), then killing.
class Supervisor {
 public:
  explicit Supervisor(const Options& options);
  ~Supervisor();

  /// Runs all plans to their end. Returns the exit code to pass on: that of the first rank that failed, 128 + signal
  /// if the launcher was told to stop, 0 if all ranks succeeded.
  /// Errors: std::system_error if a rank cannot be started; none is left running then.
  int run(const std::vector<RankPlan>& plans);

 private:
  enum class Phase { running, stopping, killing };
  struct Rank;

  void start(const RankPlan& plan);
  void supervise();
  void wait_for_events();
  void read_signals();
  void on_stop_request(int signal);
  void reap();
  void on_exit(const Rank& rank);
  void stop_all(int signal);
  void kill_all();
  void suspend();
  void signal_all(int signal);
  bool all_ended() const;
  void sweep_stragglers();
  void drain_output();
  void report();
  void say(const std::string& text);

  Options options_;
  OrphanGuard guard_;
  int signal_fd_ = -1;
  Terminal terminal_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // output, errors (if it is another file), then one per log file
  Sink* output_;
  Sink* errors_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Phase phase_ = Phase::running;
  Clock::time_point deadline_{};  // of the stopping phase
  const Rank* first_failed_ = nullptr;
  bool others_were_running_ = false;  // when it failed
  std::optional<int> stop_signal_;    // that the launcher received
};

}  // namespace deeptide::launch
