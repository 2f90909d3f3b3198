// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Slots between two counters per rank.
#include "host/ring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

#include "base/invariant.h"
#include "host/counter.h"
#include "host/operation.h"

namespace deeptide::host {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Counters of one rank. What it posts and what it has read lie apart, because others wait on each.
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
  DEEPTIDE_INVARIANT(std::has_single_bit(static_cast<uint32_t>(num_slots)), num_slots, " slots do not divide 2^32");
  host_->take_pages(counters_, static_cast<int64_t>(sizeof(Counters)) * size_);
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
  // Slot n + num_slots reuses the memory of slot n. The first slots are free, whatever the (wrapped) count.
  if (!all_read(number - static_cast<uint32_t>(num_slots_))) return nullptr;
  char* next = const_cast<char*>(slot(index_, number));
  take_pages(next);
  return next;
}

/// A channel that is never used costs no memory. Others read a slot only once it has been posted.
void Ring::take_pages(const char* next) {
  const char* own = slots_ + static_cast<int64_t>(index_) * num_slots_ * slot_bytes_;
  if (next + slot_bytes_ <= own + taken_) return;
  constexpr int64_t kAtOnce = 64 << 10;
  const int64_t wanted = std::max(next + slot_bytes_ - own, taken_ + kAtOnce);
  const int64_t end = std::min(wanted, slot_bytes_ * num_slots_);
  host_->take_pages(own + taken_, end - taken_);
  taken_ = end;
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
    // A rank that has ended may have completed its part first.
    if (!await(counters(peer).*word, number + 1, deadline, Linger::none))
      throw TransportError(host_->find_killed().value_or(*dead));
  }
  return true;
}

bool Ring::wait_posted(uint32_t number, milliseconds limit) { return wait_all(&Counters::posted, number, limit); }

bool Ring::wait_read(uint32_t number, milliseconds limit) { return wait_all(&Counters::read, number, limit); }

}  // namespace deeptide::host
