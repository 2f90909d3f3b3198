// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One host's part of the hang watch: looks into the rings of its ranks, says when a wait lasts, answers questions.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "launch/process/rank_group.h"
#include "launch/watch/stack_collector.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {

class HostWatch {
 public:
  using OnLate = std::function<void(double waited_s)>;       // a wait has reached the timeout; 0: none has any more
  using OnAnswer = std::function<void(const std::string&)>;  // a StateAnswer as text

  /// `timeout_s` 0: never late.
  HostWatch(const RankGroup& ranks, double timeout_s, OnLate on_late);

  void add_to(PollSet& set);
  /// To be called when the poll set has woken.
  void check();
  /// States are answered at once, stacks later, one question after the other.
  void ask(const StateQuestion& question, OnAnswer on_answer);
  /// The ranks were stopped until now: that was no wait.
  void forgive() { forgiven_ = Clock::now(); }

 private:
  struct Asked {
    StateQuestion question;
    OnAnswer on_answer;
  };

  void collect();
  void check_collector();
  void answer_first(const std::string& answer);

  const RankGroup& ranks_;
  double timeout_s_;
  OnLate on_late_;
  Clock::time_point next_check_ = Clock::now();
  Clock::time_point forgiven_{};
  bool late_ = false;
  std::deque<Asked> questions_;  // for stacks; the first is being answered
  std::unique_ptr<StackCollector> collector_;
};

}  // namespace deeptide::launch
