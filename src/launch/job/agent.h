// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one host's part of a job: starts the ranks, forwards their output to the launcher, and ends them when the
// launcher requests it or falls silent.
#pragma once

#include <optional>
#include <string>

#include "launch/machine/held_port.h"
#include "launch/process/process_group.h"
#include "launch/system/signal_file.h"
#include "launch/system/sink.h"
#include "launch/watch/host_watch.h"
#include "launch/wire/frame.h"
#include "launch/wire/messages.h"

namespace deeptide::launch {

/// Exchanges frames over two descriptors, which may be one socket. Opens no port.
class Agent {
 public:
  Agent(int input, int output);

  /// Serves one job. Returns the agent's own exit code, and reports the ranks' ends to the launcher.
  int run();

 private:
  enum class State : uint8_t { waiting, running, refused };

  void serve_once();
  void read_frames();
  void handle(const Frame& frame);
  void prepare(const PortRequest& wanted);
  void start(const AgentJob& job);
  void stop(const Ending::Request& request);
  void on_exit(const ProcessGroup::Member& member);
  void on_signal(int signal);
  void on_lost_launcher();
  void check_silence();
  void send(FrameKind kind, int rank = -1, std::string payload = {});
  void refuse(const std::string& why);

  int input_;
  Sink sink_;
  FrameReader reader_{false};
  SignalFile signals_;
  ProcessGroup ranks_;
  HeldPort port_;                   // where the job's ranks meet, if rank 0 is here
  std::optional<HostWatch> watch_;  // set by start()
  State state_ = State::waiting;
  bool connected_ = true;
  bool suspended_ = false;
  bool signalled_ = false;  // asked to stop, but not by the launcher
  double failure_grace_s_ = 5.0;
  double timeout_s_;
  Clock::time_point last_heard_ = Clock::now();
  Clock::time_point next_beat_ = Clock::now();
};

}  // namespace deeptide::launch
