// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collects stacks in a child process, so that the loop for output and heartbeats continues.
#pragma once

#include <string>

#include "launch/process/process_group.h"
#include "launch/watch/state_exchange.h"

namespace deeptide::launch {

class StackCollector {
 public:
  /// Starts to collect the stacks of those ranks in `question` that are also in `ranks`.
  StackCollector(const ProcessGroup& ranks, const StateQuestion& question);
  ~StackCollector();
  StackCollector(const StackCollector&) = delete;
  StackCollector& operator=(const StackCollector&) = delete;

  /// Readable when more of the answer is available.
  int fd() const { return pipe_; }
  /// Reads the available part. True at the end, which is reached within ten seconds.
  bool read();
  /// An encoded StateAnswer.
  const std::string& answer() const { return answer_; }

 private:
  int pipe_ = -1;
  std::string answer_;
};

}  // namespace deeptide::launch
