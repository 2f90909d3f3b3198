// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// An operation that a thread ends and another one awaits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>

#include "host/operation.h"

namespace deeptide::comm {

class AwaitedOperation : public host::Operation {
 public:
  bool ready() override { return done_; }

  bool advance(std::chrono::milliseconds limit) override {
    if (!done_) {
      std::unique_lock lock(mutex_);
      if (!changed_.wait_for(lock, limit, [&] { return done_.load(); })) return false;
    }
    if (!failure_.empty()) throw host::TransportError(failure_);
    return true;
  }

 protected:
  /// Called once. `failure`: empty if the result is whole; `release` lets go of what only the operation needed.
  template <class Release>
  void end_with(std::string failure, Release&& release) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    release();
    done_ = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::string failure_;  // before done_

 private:
  std::condition_variable changed_;
  std::atomic<bool> done_ = false;
};

}  // namespace deeptide::comm
