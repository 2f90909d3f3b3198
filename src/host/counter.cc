// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Spins or yields for a moment, then sleeps on a futex.
#include "host/counter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace deeptide::host {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

namespace {

constexpr nanoseconds kLinger{30'000};  // a round trip between two cores is 0.3 us, waking a sleeper 5 to 50

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void let_pass(Linger linger) {
  if (linger == Linger::yield) {
    ::sched_yield();
  } else {
    for (int i = 0; i < 32; ++i) relax();
  }
}

}  // namespace

void publish(Counter& counter, uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) > 0) futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t advance(Counter& counter) {
  const uint32_t value = counter.value.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (counter.sleepers.load(std::memory_order_seq_cst) > 0) futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr);
  return value;
}

bool await(Counter& counter, uint32_t target, steady_clock::time_point deadline, Linger linger) {
  const auto is_there = [&] { return reached(counter.value.load(std::memory_order_acquire), target); };
  if (is_there()) return true;
  if (linger != Linger::none) {
    const auto until = steady_clock::now() + kLinger;
    do {
      let_pass(linger);
      if (is_there()) return true;
    } while (steady_clock::now() < until);
  }
  for (;;) {
    const auto left = std::chrono::duration_cast<nanoseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return is_there();
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (!reached(seen, target)) {
      const timespec timeout{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
      futex(counter.value, FUTEX_WAIT, seen, &timeout);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (is_there()) return true;
  }
}

}  // namespace deeptide::host
