// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps the ways to ask others, and looks at the control groups' limits.
#include "device/memory/idle_memory.h"

#include <pthread.h>

#include <exception>
#include <mutex>
#include <vector>

#include "device/memory/memory_limit.h"

namespace deeptide::device {
namespace {

constexpr int64_t kWorthMakingRoom = 8 << 20;  // a look at the limits takes some 50 us

struct Others {
  std::mutex mutex;
  std::list<AskOthers> asks;
};

/// Never destroyed: memory is needed until the process ends.
Others& others() {
  static Others& kept = *[] {
    ::pthread_atfork([] { others().mutex.lock(); }, [] { others().mutex.unlock(); }, [] { others().mutex.unlock(); });
    return new Others();
  }();
  return kept;
}

}  // namespace

Asking::Asking(AskOthers ask) {
  const std::lock_guard lock(others().mutex);
  place_ = others().asks.insert(others().asks.end(), std::move(ask));
}

Asking::~Asking() {
  const std::lock_guard lock(others().mutex);
  others().asks.erase(place_);
}

bool release_idle_of_others() {
  std::vector<AskOthers> asks;
  {
    const std::lock_guard lock(others().mutex);
    asks.assign(others().asks.begin(), others().asks.end());
  }
  bool answered = false;
  for (const AskOthers& ask : asks) answered = ask() || answered;
  return answered;
}

void make_room(int64_t bytes) noexcept try {
  if (bytes < kWorthMakingRoom) return;
  take_before_idle([&] {
    const auto limit = tightest_memory_limit();
    return !limit || limit->left >= bytes;
  });
} catch (const std::exception&) {
  // Without memory for the look itself: who asked for memory will hear of it.
}

}  // namespace deeptide::device
