// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Stopping early, on ^C or when the time is up, at the same step on every rank. The twin of stop.py.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "deeptide/world.h"

namespace gpt {

/// While it lives, ^C and SIGTERM are a wish, and `agreed` says when all ranks fulfil it. One at a time.
/// A rank that wants to stop says so in the store before a step, and all look there after it: since the step itself
/// waits for every rank, all see the same.
class StopRequest {
 public:
  StopRequest(const deeptide::World& world, std::optional<double> minutes);
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  void before_step(int64_t step);
  /// After the step: has any rank asked for a stop at it?
  bool agreed(int64_t step);
  /// Whether what stopped the ranks was a signal.
  bool interrupted() const;

 private:
  deeptide::World world_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  std::string reason_;
  struct sigaction old_interrupt_, old_terminate_;
};

}  // namespace gpt
