// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Implements the launcher's end of the connection to one host's agent.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/process/process.h"
#include "launch/system/poll_set.h"
#include "launch/system/sink.h"
#include "launch/wire/frame.h"
#include "launch/wire/messages.h"

namespace deeptide::launch {

class AgentLink {
 public:
  enum class State : uint8_t {
    connecting,
    ready,    // the agent has sent its hello
    running,  // the agent has been told to start
    ended,    // the agent reported the end of all ranks, or was not needed
    refused,  // the agent reported why it does not start
    lost,     // the connection broke or was never made
  };
  struct Events {
    std::function<void(AgentLink&, const Frame&)> frame;
    std::function<void(AgentLink&, const std::string& line)> noise;  // standard error of the connecting program
    std::function<void(AgentLink&)> changed;                         // the state became refused or lost
  };

  /// Creates an unconnected link; call attach() or connect_by() next.
  AgentLink(Host host, const Events& events);
  ~AgentLink();
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  /// Starts `command` and uses its standard input and output. Errors: as Process.
  void connect_by(const std::vector<std::string>& command);
  /// Uses a connected socket and takes ownership of it.
  void attach(int socket);

  void add_to(PollSet& set, bool with_output);
  /// Sends a heartbeat if one is due; declares the connection lost after `timeout_s` of silence.
  void check_time(double timeout_s);
  /// Restarts the silence timer after a time in which the launcher read no frames.
  void forgive_silence() { last_heard_ = Clock::now(); }
  void send(FrameKind kind, std::string payload = {});
  void set_state(State state) { state_ = state; }
  /// Gives up the connection; `why` follows the host's name in reports.
  void lose(const std::string& why);
  /// Call after the end: writes pending output and waits until `limit` for the connecting program to end.
  void close(Clock::time_point limit);

  const Host& host() const { return host_; }
  State state() const { return state_; }
  bool live() const { return state_ == State::ready || state_ == State::running; }
  bool over() const { return state_ == State::ended || state_ == State::refused || state_ == State::lost; }
  const std::string& why() const { return why_; }  // reason for `lost` or `refused`

  HostPlace place;                     // set once the world is known
  std::vector<std::string> addresses;  // reported by the agent
  int num_running = 0;                 // running ranks

 private:
  void read_frames();
  void read_noise();
  void on_closed();
  void handle(const Frame& frame);

  Host host_;
  const Events& events_;
  State state_ = State::connecting;
  std::unique_ptr<Process> process_;
  int input_ = -1, socket_ = -1;
  std::unique_ptr<Sink> sink_;
  FrameReader reader_{true};
  std::string noise_;               // an unfinished line of the connecting program
  std::deque<std::string> noises_;  // its last lines
  std::string why_;
  Clock::time_point last_heard_ = Clock::now();
  Clock::time_point next_beat_ = Clock::now();
};

}  // namespace deeptide::launch
