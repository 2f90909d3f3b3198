// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counters with release and acquire, futexes for those who sleep.
#include "host/ring.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <climits>
#include <ctime>

#include "host/operation.h"

namespace deeptide::host {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

namespace {

constexpr nanoseconds kLinger{30'000};  // a round trip between two cores is 0.3 us, waking a sleeper 5 to 50

/// A counter that others wait for. Zeroed memory is its first state.
struct Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

/// Counts wrap: `a` has reached `b` when it is not behind it.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void publish(Counter& counter, uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) > 0) futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// How to pass the moment before sleeping: keeping a core that no other rank needs, or letting the next one have it.
enum class Linger : uint8_t { none, spin, yield };

void let_pass(Linger linger) {
  if (linger == Linger::yield) {
    ::sched_yield();
  } else {
    for (int i = 0; i < 32; ++i) relax();
  }
}

/// Until `counter` has reached `target` or the time is up.
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

}  // namespace

/// Of one rank; what it posts and what it has read lie apart, for others wait on each.
struct Ring::Counters {
  alignas(128) Counter posted;
  alignas(128) Counter read;
};

Ring::Ring(std::shared_ptr<Host> host, int num_slots, int64_t slot_bytes)
    : host_(std::move(host)),
      size_(host_->size()),
      index_(host_->index()),
      num_slots_(num_slots),
      slot_bytes_(slot_bytes),
      counters_(host_->reserve(static_cast<int64_t>(sizeof(Counters)) * size_)),
      slots_(host_->reserve(slot_bytes * num_slots * size_)) {
  TORCH_INTERNAL_ASSERT(std::has_single_bit(static_cast<uint32_t>(num_slots)), num_slots, " slots do not divide 2^32");
}

Ring::Counters& Ring::counters(int peer) const {
  return *reinterpret_cast<Counters*>(counters_ + static_cast<int64_t>(sizeof(Counters)) * peer);
}

uint32_t Ring::num_posted() const { return counters(index_).posted.value.load(std::memory_order_relaxed); }

void Ring::start_at(uint32_t count) {
  counters(index_).posted.value = count;
  counters(index_).read.value = count;
}

char* Ring::next_slot() {
  const uint32_t number = num_posted();
  // Slot n + num_slots lies where slot n lay. The first ones are free, whatever the (wrapped) count.
  if (!all_read(number - static_cast<uint32_t>(num_slots_))) return nullptr;
  return const_cast<char*>(slot(index_, number));
}

uint32_t Ring::post() {
  const uint32_t number = num_posted();
  publish(counters(index_).posted, number + 1);
  return number;
}

const char* Ring::slot(int peer, uint32_t number) const {
  return slots_ + (static_cast<int64_t>(peer) * num_slots_ + number % static_cast<uint32_t>(num_slots_)) * slot_bytes_;
}

bool Ring::is_posted(int peer, uint32_t number) const {
  return reached(counters(peer).posted.value.load(std::memory_order_acquire), number + 1);
}

bool Ring::all_posted(uint32_t number) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (!is_posted(peer, number)) return false;
  }
  return true;
}

void Ring::set_read(uint32_t number) { publish(counters(index_).read, number + 1); }

bool Ring::all_read(uint32_t number) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (!reached(counters(peer).read.value.load(std::memory_order_acquire), number + 1)) return false;
  }
  return true;
}

template <typename Word>
bool Ring::wait_all(Word Counters::*word, uint32_t number, milliseconds limit) {
  const auto deadline = steady_clock::now() + limit;
  const Linger linger = limit.count() == 0 ? Linger::none : host_->has_core_each() ? Linger::spin : Linger::yield;
  for (int peer = 0; peer < size_; ++peer) {
    if (await(counters(peer).*word, number + 1, deadline, linger)) continue;
    if (limit.count() == 0) return false;
    const auto dead = host_->find_dead();
    if (!dead) return false;
    // Whoever ended may have done its part first.
    if (!await(counters(peer).*word, number + 1, deadline, Linger::none)) throw TransportError(*dead);
  }
  return true;
}

bool Ring::wait_posted(uint32_t number, milliseconds limit) { return wait_all(&Counters::posted, number, limit); }

bool Ring::wait_read(uint32_t number, milliseconds limit) { return wait_all(&Counters::read, number, limit); }

}  // namespace deeptide::host
