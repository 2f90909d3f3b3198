// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks ranks for their stacks from a process of its own: the loop that carries output and heartbeats goes on meanwhile.
#pragma once

#include <string>

#include "launch/process/rank_group.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {

class StackCollector {
 public:
  /// Starts to answer `question` for those of its ranks that are in `ranks`.
  StackCollector(const RankGroup& ranks, const StateQuestion& question);
  ~StackCollector();
  StackCollector(const StackCollector&) = delete;
  StackCollector& operator=(const StackCollector&) = delete;

  /// Readable when there is more of the answer.
  int fd() const { return pipe_; }
  /// Takes what is there; true at the end, which comes within ten seconds.
  bool read();
  /// A StateAnswer as text.
  const std::string& answer() const { return answer_; }

 private:
  int pipe_ = -1;
  std::string answer_;
};

}  // namespace deeptide::launch
