// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// All-gathers that go on while the program computes, over transports whose callers move the bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/group.h"

namespace deeptide::comm {

/// Runs all-gathers of a group on a thread of its own, in the order in which they were added. The group is the
/// thread's until all of them are done. Used by one thread. An engine's part: a forked child, which lacks the thread,
/// neither uses nor destroys it.
class BackgroundGathers {
 public:
  /// `most_bytes`: of outputs under way; no more are started then, but the next that is due always is.
  /// Errors: as start_needed_thread.
  BackgroundGathers(Group& group, int64_t most_bytes);
  /// Gives up what is under way.
  ~BackgroundGathers();
  BackgroundGathers(const BackgroundGathers&) = delete;

  /// Shapes: input (N,), output (W * N,). The operation ends by itself; its `advance` only waits. All ranks call it in
  /// one order. After a failure all later ones fail with its text.
  OperationPtr add(at::Tensor output, at::Tensor input);

 private:
  class Gather;

  void run();
  void start_due();
  void end_first();

  Group& group_;
  const int64_t most_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Gather>> added_;
  bool stop_ = false;

  // The thread's own.
  struct UnderWay {
    std::shared_ptr<Gather> gather;
    Pending pending;
  };
  std::deque<UnderWay> under_way_;
  int64_t bytes_ = 0;    // of outputs under way
  std::string failure_;  // of the transport; empty: none

  std::thread thread_;
};

}  // namespace deeptide::comm
