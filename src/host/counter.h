// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A counter in shared memory that other processes wait for: release and acquire, and a futex for sleepers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace deeptide::host {

/// Zeroed memory is its initial state. Counts wrap around at 2^32.
struct Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

/// How a waiter spends the moment before it sleeps: spin on a core that no other rank needs, or yield the core.
enum class Linger : uint8_t { none, spin, yield };

/// Whether count `a` is not behind `b`.
inline bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

/// Stores `value` after all earlier writes, and wakes the sleepers.
void publish(Counter& counter, uint32_t value);

/// Adds one after all earlier writes, wakes the sleepers, and returns the new count.
uint32_t advance(Counter& counter);

/// Waits until `counter` reaches `target` or `deadline` passes. Returns whether it has reached `target`.
bool await(Counter& counter, uint32_t target, std::chrono::steady_clock::time_point deadline, Linger linger);

}  // namespace deeptide::host
