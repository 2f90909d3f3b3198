// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves blocks through the slots.
#include "tiers/staging.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <stdexcept>

#include "base/invariant.h"

namespace deeptide::tiers {

using at::Tensor;

Staging::Staging(std::unique_ptr<io::Queue> queue, int num_slots, const std::shared_ptr<device::Ledger>& ledger,
                 device::Role role)
    : queue_(std::move(queue)), slots_(static_cast<size_t>(num_slots)) {
  arena_ = device::allocate_flat(ledger, role, num_slots * kSwapBlockBytes + io::kAlignment, at::kByte, at::kCPU);
  const auto address = reinterpret_cast<uintptr_t>(arena_.data_ptr());
  const auto misaligned = static_cast<int64_t>(address % io::kAlignment);
  int64_t begin = misaligned == 0 ? 0 : io::kAlignment - misaligned;
  for (Slot& slot : slots_) {
    slot.memory = arena_.narrow(0, begin, kSwapBlockBytes);
    begin += kSwapBlockBytes;
  }
}

Staging::~Staging() { queue_.reset(); }

Staging::Slot* Staging::find(Key key) {
  for (Slot& slot : slots_) {
    if (slot.state != State::empty && slot.key == key) return &slot;
  }
  return nullptr;
}

void Staging::start(Slot& slot, bool read) {
  slot.state = read ? State::reading : State::writing;
  slot.ticket = queue_->start({slot.place.fd, slot.place.at, slot.memory.data_ptr(), slot.place.bytes, read});
}

/// Waits for the slot's transfer. A block that could not be read is dropped; one that could not be written stays.
void Staging::finish(Slot& slot, const std::string& what) {
  if (slot.state != State::reading && slot.state != State::writing) return;
  const bool read = slot.state == State::reading;
  const int error = queue_->wait(slot.ticket);
  if (error == 0) {
    slot.state = State::clean;
    return;
  }
  slot.state = read ? State::empty : State::dirty;
  throw std::runtime_error(std::string(read ? "reading" : "writing") + " a block of " + what + " in '" +
                           *slot.place.folder + "' failed: " + std::strerror(error));
}

/// Returns the least recently used slot that can be emptied without waiting; null if there is none.
Staging::Slot* Staging::idle_slot() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.leases > 0 || (slot.state != State::empty && slot.state != State::clean)) continue;
    if (slot.state == State::empty) return &slot;
    if (oldest == nullptr || slot.last_use < oldest->last_use) oldest = &slot;
  }
  return oldest;
}

Staging::Slot& Staging::take(const std::string& what) {
  if (Slot* idle = idle_slot()) return *idle;
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.leases == 0 && (oldest == nullptr || slot.last_use < oldest->last_use)) oldest = &slot;
  }
  DEEPTIDE_INVARIANT(oldest != nullptr, "all ", slots_.size(), " blocks of the staging memory are open");
  if (oldest->state == State::dirty) start(*oldest, /*read=*/false);
  finish(*oldest, what);
  return *oldest;
}

/// Starts writing the owner's other changed blocks: it has gone on to this one.
void Staging::write_behind(Key key) {
  for (Slot& slot : slots_) {
    const bool other = slot.key.owner == key.owner && slot.key.block != key.block;
    if (other && slot.leases == 0 && slot.state == State::dirty) start(slot, /*read=*/false);
  }
}

Tensor Staging::open(Key key, const DiskPlace& place, bool keep_values, const std::string& what) {
  Slot* slot = find(key);
  if (slot == nullptr) {
    slot = &take(what);
    slot->key = key;
    slot->place = place;
    slot->state = State::clean;
    if (keep_values) start(*slot, /*read=*/true);
  }
  finish(*slot, what);
  write_behind(key);
  ++slot->leases;
  slot->last_use = ++clock_;
  return slot->memory;
}

void Staging::close(Key key, bool changed) noexcept {
  Slot* slot = find(key);
  if (slot == nullptr) return;
  --slot->leases;
  if (changed) slot->state = State::dirty;
}

void Staging::forget(const void* owner) noexcept {
  for (Slot& slot : slots_) {
    if (slot.key.owner != owner || slot.state == State::empty) continue;
    if (slot.state == State::reading || slot.state == State::writing) queue_->wait(slot.ticket);
    slot.state = State::empty;
  }
}

void Staging::prefetch(Key key, const DiskPlace& place) {
  if (find(key) != nullptr) return;
  Slot* slot = idle_slot();
  if (slot == nullptr) return;
  slot->key = key;
  slot->place = place;
  slot->last_use = ++clock_;
  start(*slot, /*read=*/true);
}

}  // namespace deeptide::tiers
