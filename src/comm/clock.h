// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How far training is, for errors and logs.
#pragma once

#include <atomic>
#include <cstdint>

namespace deeptide::comm {

/// The engine sets it, and every channel reads it. Thread-safe.
class Clock {
 public:
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> step_{0};
};

}  // namespace deeptide::comm
