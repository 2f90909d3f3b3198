// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one attempt at a job over several hosts, from the first connection to the end of the last agent.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/output/failure_report.h"
#include "launch/output/job_output.h"
#include "launch/plan/options.h"
#include "launch/process/ending.h"
#include "launch/process/own_end.h"
#include "launch/system/signal_file.h"
#include "launch/watch/hang_watch.h"
#include "launch/wire/agent_link.h"
#include "launch/wire/pdsh_hub.h"

namespace deeptide::launch {

/// The objects that an attempt uses; they must outlive it.
struct AttemptContext {
  const Options& options;
  const SignalFile& signals;
  JobOutput& output;
  HangWatch& watch;
  int restarts = 0;  // restarts before this attempt
  size_t min_hosts;  // fewer hosts are a failure; equals the number of hosts unless the job is elastic
  /// Chooses the slots to use among the reached hosts; empty: too few. Hosts that are not chosen start no ranks.
  std::function<std::vector<Host>(const std::vector<Host>&)> choose;
};

struct AttemptResult {
  int exit_code = 0;
  bool restartable = false;  // a rank or a host failed, and the user did not stop the job
};

class JobAttempt {
 public:
  JobAttempt(const AttemptContext& context, const std::vector<Host>& hosts);

  /// Runs until all ranks have ended and all agents are gone, or have been given up.
  AttemptResult run();

 private:
  enum class Stage : uint8_t { connecting, preparing, running };

  void connect();
  void serve_once();
  void on_frame(AgentLink& link, const Frame& frame);
  void on_rank_exit(AgentLink& link, int rank, const RankExit& exit);
  void on_changed(AgentLink& link);
  void on_signal(int signal);
  void check_connected();
  void prepare();
  void start(int master_port);
  void start_watch();
  size_t index_of(const AgentLink& link) const;  // in used_
  void stop(int signal, double grace_s);
  void kill();
  void ask_to_end();
  void give_up();
  void check_deadlines();
  void check_answers();
  void close_links();
  bool all_over() const;
  size_t num_running() const;
  AgentLink& first_link();

  AttemptContext context_;
  AgentLink::Events events_;
  std::vector<std::unique_ptr<AgentLink>> links_;
  std::unique_ptr<PdshHub> pdsh_;
  std::vector<AgentLink*> used_;  // in the order of ranks
  FailureReport failures_;
  bool too_few_hosts_ = false;
  std::string refusal_;  // reason of the first host that refused
  std::optional<int> stop_signal_;
  Clock::time_point stopped_at_;  // when it came
  OwnEnd own_end_;                // of ranks, after it
  Stage stage_ = Stage::connecting;
  Clock::time_point deadline_;  // for connecting and preparing
  Ending ending_;
};

}  // namespace deeptide::launch
