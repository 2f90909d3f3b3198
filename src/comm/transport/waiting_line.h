// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A thread that waits for transfers, one after the other, where nothing but a wait tells that they have ended.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/transport/awaited_operation.h"

namespace deeptide::comm {

/// Transfers that end in the order in which they were started. A wait of Gloo's that ends early breaks its connection,
/// a second one may never return, and Gloo tells in no other way whether bytes have arrived: so one thread waits, once
/// for each, without a limit. It starts with `start` or the first transfer. A forked child, which lacks it, neither
/// uses nor destroys the line. Used by one thread.
class WaitingLine {
 public:
  class Transfer : public AwaitedOperation {
   public:
    /// Waits for what was started, and ends the operation; on the line's thread.
    virtual void complete() = 0;
    /// Makes `complete` return soon; on another thread.
    virtual void abort() = 0;
  };

  WaitingLine() = default;
  /// Gives up what is under way.
  ~WaitingLine();
  WaitingLine(const WaitingLine&) = delete;
  WaitingLine& operator=(const WaitingLine&) = delete;

  /// Starts the thread, if it does not run yet. Errors: as start_needed_thread.
  void start();
  void add(std::shared_ptr<Transfer> transfer);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Transfer>> queue_;  // the front is the thread's
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace deeptide::comm
