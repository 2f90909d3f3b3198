// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Links a rank under mpirun or srun to the launcher of its job.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/system/poll_set.h"
#include "launch/watch/state_exchange.h"
#include "launch/wire/token_link.h"

namespace deeptide::launch {

/// Connects in the background. Tries the addresses in turn, and all of them again after a pause that doubles from one
/// second to half a minute: a rank may start before its network is up, and a link may break while the job goes on.
class HubLink {
 public:
  struct Events {
    std::function<void(const StateQuestion&)> asked;
    std::function<void()> changed;  // the link is up, or broke
  };

  /// `at`: the value of kHubVariable; `hello`: an encoded RankHello.
  HubLink(const std::string& at, std::string token, std::string hello, Events events);
  ~HubLink();
  HubLink(const HubLink&) = delete;
  HubLink& operator=(const HubLink&) = delete;

  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();
  void send(FrameKind kind, std::string payload);

  bool up() const { return up_; }

 private:
  void try_next();
  void start_connecting(const std::string& address);
  void pause();
  void on_connected();
  void on_closed();
  void give_up_socket();

  std::string port_, token_, hello_;
  Events events_;
  std::vector<std::string> addresses_;
  size_t next_ = 0;  // index of the next address to try
  int connecting_ = -1;
  Clock::time_point deadline_{};  // of the current connection, or of the pause
  Clock::duration pause_;
  Clock::time_point up_since_{};
  std::unique_ptr<TokenLink> link_;
  bool up_ = false;
};

}  // namespace deeptide::launch
