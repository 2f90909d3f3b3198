// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks in short turns: a store's own wait does not look at signals, and c10d logs each wait that ends without an
// answer.
#include "world/store_wait.h"

#include <algorithm>
#include <thread>

#include "base/interrupt.h"

namespace deeptide::world {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout) {
  const auto end = steady_clock::now() + timeout;
  for (auto nap = kShortestNap; !store.check(keys); nap = std::min(2 * nap, kLongestNap)) {
    if (steady_clock::now() >= end) return store.wait(keys, milliseconds(1));  // throws as c10d does
    check_interrupts();
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace deeptide::world
