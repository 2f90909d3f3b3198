// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one round of poll(2) over descriptors with handlers.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>
#include <vector>

namespace deeptide::launch {

using Clock = std::chrono::steady_clock;

/// Refilled for each round, so that no handler outlives the objects it refers to.
class PollSet {
 public:
  void add(int fd, short events, std::function<void()> handler) {
    polled_.push_back({fd, events, 0});
    handlers_.push_back(std::move(handler));
  }

  /// Wakes no later than `limit`.
  void wake_by(Clock::time_point limit) { limit_ = std::min(limit_, limit); }

  /// Waits once and runs the handlers of ready descriptors. A handler may close its own descriptor, not another's.
  void wait() {
    int timeout = -1;
    if (limit_ != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit_ - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<long>(left, 0, 3'600'000));
    }
    if (poll(polled_.data(), polled_.size(), timeout) <= 0) return;
    for (size_t i = 0; i < polled_.size(); ++i) {
      if (polled_[i].revents) handlers_[i]();
    }
  }

 private:
  std::vector<pollfd> polled_;
  std::vector<std::function<void()>> handlers_;
  Clock::time_point limit_ = Clock::time_point::max();
};

}  // namespace deeptide::launch
