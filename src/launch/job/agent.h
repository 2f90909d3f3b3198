// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One host's part of a job: starts its ranks, carries their output to the launcher, ends them when the launcher says so
// or is not heard of any more.
#pragma once

#include <optional>
#include <string>

#include "launch/process/rank_group.h"
#include "launch/system/signal_file.h"
#include "launch/system/sink.h"
#include "launch/watch/host_watch.h"
#include "launch/wire/agent_job.h"
#include "launch/wire/frame.h"

namespace deeptide::launch {

/// Speaks frames on two descriptors, which may be one socket. Listens on no port.
class Agent {
 public:
  Agent(int input, int output);

  /// Serves one job. Returns the agent's own exit code; how the ranks ended is told to the launcher.
  int run();

 private:
  enum class State : uint8_t { waiting, running, refused };

  void serve_once();
  void read_frames();
  void handle(const Frame& frame);
  void prepare(const std::string& text);
  void start(const std::string& text);
  void stop(const std::string& text);
  void on_exit(const RankGroup::Member& member);
  void on_signal(int signal);
  void on_lost_launcher();
  void check_silence();
  void send(FrameKind kind, int rank = -1, std::string payload = {});
  void refuse(const std::string& why);

  int input_;
  Sink sink_;
  FrameReader reader_{false};
  SignalFile signals_;
  RankGroup ranks_;
  std::optional<HostWatch> watch_;  // since the start
  State state_ = State::waiting;
  bool connected_ = true;
  bool suspended_ = false;
  bool signalled_ = false;  // told to stop, but not by the launcher
  double failure_grace_s_ = 5.0;
  double timeout_s_;
  Clock::time_point last_heard_ = Clock::now();
  Clock::time_point next_beat_ = Clock::now();
};

}  // namespace deeptide::launch
