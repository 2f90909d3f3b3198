// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Watches the rings of a host's ranks: reports a hang once, and answers `deeptide ps` and `deeptide stacks`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launch/job_socket.h"
#include "launch/rank_group.h"
#include "launch/rank_state.h"

namespace deeptide::launch {

/// The states of all ranks that have not ended; with stacks of those that a report shows.
std::vector<RankState> read_states(const RankGroup& ranks, bool with_stacks);

class HangWatch {
 public:
  /// What the ranks are doing now, those of other hosts too if their agents tell.
  using States = std::function<std::vector<RankState>(bool with_stacks)>;

  /// `timeout_s`: how long a wait may last before `say` gets a report; 0: no reports. `command`: what ps shows.
  HangWatch(States states, double timeout_s, std::string command, std::function<void(const std::string&)> say);

  void add_to(PollSet& set);
  /// To be called when the poll set has woken.
  void check();

 private:
  std::string answer(const std::string& request);

  States states_;
  double timeout_s_;
  std::string command_;
  std::function<void(const std::string&)> say_;
  JobSocket socket_;
  Clock::time_point started_ = Clock::now();
  Clock::time_point next_check_;
  bool reported_ = false;  // until somebody moves again
};

}  // namespace deeptide::launch
