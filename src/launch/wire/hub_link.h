// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Links a rank under mpirun or srun to the launcher of its job.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "launch/system/poll_set.h"
#include "launch/watch/state_exchange.h"
#include "launch/wire/token_link.h"

namespace deeptide::launch {

/// Connects in the background. Tries each address once, and gives up if none reaches the launcher.
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
  void on_connected();
  void give_up_socket();

  std::string port_, token_, hello_;
  Events events_;
  std::deque<std::string> addresses_;  // not tried yet
  int connecting_ = -1;
  Clock::time_point deadline_{};  // of the current connection
  std::unique_ptr<TokenLink> link_;
  bool up_ = false;
};

}  // namespace deeptide::launch
