// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Does one host's part of the hang watch: reads the rings of its ranks, announces long waits, answers queries.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/process/process_group.h"
#include "launch/watch/stack_collector.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {

class HostWatch {
 public:
  using OnLate = std::function<void(double waited_s)>;       // a wait has reached the timeout; 0: the wait is over
  using OnAnswer = std::function<void(const std::string&)>;  // an encoded StateAnswer

  /// `timeout_s` of 0: never late.
  HostWatch(const ProcessGroup& ranks, double timeout_s, OnLate on_late);

  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();
  /// Passes on what a question asks of the ranks. Answers queries for states at once, and queries for stacks later,
  /// one after the other.
  void ask(const StateQuestion& question, OnAnswer on_answer);
  /// Discounts all waits so far: the ranks were stopped.
  void forgive() { forgiven_ = Clock::now(); }

 private:
  struct Asked {
    StateQuestion question;
    OnAnswer on_answer;
  };

  std::vector<RankState> answer_at_once(const StateQuestion& question) const;
  void collect();
  void check_collector();
  void answer_first(const std::string& answer);

  const ProcessGroup& ranks_;
  double timeout_s_;
  OnLate on_late_;
  Clock::time_point next_check_ = Clock::now();
  Clock::time_point forgiven_{};
  bool late_ = false;
  std::deque<Asked> questions_;  // for stacks; the first one is being answered
  std::unique_ptr<StackCollector> collector_;
};

}  // namespace deeptide::launch
