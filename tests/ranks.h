// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of the test's process, over one in-process store.
#pragma once

#include <ATen/Parallel.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "deeptide/world.h"

namespace deeptide {

using RankMain = std::function<void(const World&)>;

/// Gloo's threads spin for a lock: one that wakes must not preempt the thread that holds it, or it spins for its whole
/// time slice; with more ranks than cores, most of the time was lost there. A rank's transport threads inherit this.
inline void wake_gently() {
  const sched_param parameters{};
  sched_setscheduler(0, SCHED_BATCH, &parameters);
}

/// Calls rank_main(world) in one thread per rank; returns the text of each rank's exception, or empty texts.
/// Ranks that do not end in time end the process: a thread that hangs cannot be stopped, and later tests would suffer.
inline std::vector<std::string> errors_of_ranks(int size, const RankMain& rank_main,
                                                std::chrono::seconds timeout = std::chrono::seconds(120)) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<bool> ended(size, false);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);  // the ranks are the parallelism
      wake_gently();
      std::string error;
      try {
        rank_main(make_world(store, rank, size));
      } catch (const std::exception& e) {
        error = *e.what() ? e.what() : "an exception without a text";
      }
      std::lock_guard lock(mutex);
      errors[rank] = std::move(error);
      ended[rank] = true;
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto all_ended = [&] { return std::count(ended.begin(), ended.end(), true) == size; };
    if (!changed.wait_for(lock, timeout, all_ended)) {
      for (int rank = 0; rank < size; ++rank) {
        std::fprintf(stderr, "rank %d of %d %s\n", rank, size, ended[rank] ? errors[rank].c_str() : "hangs");
      }
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// Runs ranks that must all succeed. Errors: RuntimeError with every failed rank's number and text.
inline void run_ranks(int size, const RankMain& rank_main, std::chrono::seconds timeout = std::chrono::seconds(120)) {
  const auto errors = errors_of_ranks(size, rank_main, timeout);
  std::string text;
  for (int rank = 0; rank < size; ++rank) {
    if (!errors[rank].empty()) text += "rank " + std::to_string(rank) + ": " + errors[rank] + "\n";
  }
  if (!text.empty()) throw std::runtime_error(text);
}

}  // namespace deeptide
