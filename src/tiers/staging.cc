// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves blocks through the slots.
#include "tiers/staging.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/invariant.h"
#include "trace/recorder.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

/// A block beyond the end of its file would read as zeros as soon as later blocks are written.
bool is_cut_off(const DiskPlace& place) {
  struct stat file = {};
  return ::fstat(place.fd, &file) == 0 && file.st_size < place.at + place.bytes;
}

}  // namespace

Staging::Staging(std::unique_ptr<io::Queue> queue, int num_slots, const std::shared_ptr<device::Ledger>& ledger,
                 device::Role role, at::Device device)
    : queue_(std::move(queue)), slots_(static_cast<size_t>(num_slots)) {
  if (!device.is_cpu()) {
    const std::vector<int64_t> sizes(slots_.size(), kSwapBlockBytes);
    locked_ = std::make_unique<device::PageLocked>(ledger, role, device, sizes);
    for (Slot& slot : slots_) slot.memory = locked_->take(kSwapBlockBytes, at::kByte);
    return;
  }
  arena_ = device::allocate_flat(ledger, role, num_slots * kSwapBlockBytes, at::kByte, at::kCPU);
  DEEPTIDE_INVARIANT(reinterpret_cast<uintptr_t>(arena_.data_ptr()) % io::kAlignment == 0,
                     "memory for transfers that begins within a page");
  int64_t begin = 0;
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
  slot.ticket.reset();
  if (is_cut_off(slot.place)) return;
  slot.ticket = queue_->start({slot.place.fd, slot.place.at, slot.memory.data_ptr(), slot.place.bytes, read});
}

/// Ends the slot's transfer. Returns what went wrong, or an empty text.
std::string Staging::result_of(Slot& slot) {
  if (!slot.ticket) return "the file has been truncated";
  const trace::Span span(trace::RecorderScope::current(), trace::Work::file, slot.what);
  const int error = queue_->wait(*std::exchange(slot.ticket, {}));
  return error == 0 ? "" : std::strerror(error);
}

/// Waits for the slot's transfer. A block that could not be read is dropped; one that could not be written stays.
void Staging::finish(Slot& slot) {
  if (slot.state != State::reading && slot.state != State::writing) return;
  const bool read = slot.state == State::reading;
  const std::string error = result_of(slot);
  slot.state = error.empty() ? State::clean : read ? State::empty : State::dirty;
  if (error.empty()) return;
  throw std::runtime_error(std::string(read ? "reading" : "writing") + " a block of " + slot.what + " in '" +
                           *slot.place.folder + "' failed: " + error);
}

/// Writes that ended make their slots free. One that failed is tried again when its memory is wanted.
void Staging::settle_writes() {
  for (Slot& slot : slots_) {
    if (slot.state != State::writing || (slot.ticket && !queue_->is_done(*slot.ticket))) continue;
    slot.state = result_of(slot).empty() ? State::clean : State::dirty;
  }
}

/// Returns the least recently used slot that can be emptied without waiting; null if there is none.
Staging::Slot* Staging::idle_slot() {
  settle_writes();
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.leases > 0 || (slot.state != State::empty && slot.state != State::clean)) continue;
    if (slot.state == State::empty) return &slot;
    if (oldest == nullptr || slot.last_use < oldest->last_use) oldest = &slot;
  }
  return oldest;
}

Staging::Slot& Staging::take() {
  if (Slot* idle = idle_slot()) return *idle;
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.leases == 0 && (oldest == nullptr || slot.last_use < oldest->last_use)) oldest = &slot;
  }
  DEEPTIDE_INVARIANT(oldest != nullptr, "all ", slots_.size(), " blocks of the staging memory are open");
  if (oldest->state == State::dirty) start(*oldest, /*read=*/false);
  finish(*oldest);
  return *oldest;
}

void Staging::lend(Slot& slot, Key key, const DiskPlace& place, const std::string& what) {
  slot.key = key;
  slot.place = place;
  slot.what = what;
  slot.state = State::clean;
}

Tensor Staging::open(Key key, const DiskPlace& place, bool keep_values, const std::string& what) {
  std::lock_guard lock(mutex_);
  Slot* slot = find(key);
  if (slot == nullptr) {
    slot = &take();
    lend(*slot, key, place, what);
    if (keep_values) start(*slot, /*read=*/true);
  }
  finish(*slot);
  for (Slot& other : slots_) {  // the owner has gone on to this block
    const bool behind = other.key.owner == key.owner && other.key.block != key.block;
    if (behind && other.leases == 0 && other.state == State::dirty) start(other, /*read=*/false);
  }
  ++slot->leases;
  slot->last_use = ++clock_;
  return slot->memory;
}

Tensor Staging::copy_of(Key key, const DiskPlace& place, const std::string& what) {
  {
    std::lock_guard lock(mutex_);
    if (Slot* slot = find(key)) {
      if (slot->state == State::reading) finish(*slot);
      return slot->memory.narrow(0, 0, place.bytes).clone();
    }
  }
  // Nobody holds the block, so its file has what was written last. O_DIRECT wants an aligned address.
  const Tensor memory = at::empty({place.bytes + io::kAlignment}, at::kByte);
  const auto address = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const Tensor aligned = memory.narrow(0, static_cast<int64_t>(-address % io::kAlignment), place.bytes);
  const ssize_t done = ::pread(place.fd, aligned.mutable_data_ptr(), static_cast<size_t>(place.bytes), place.at);
  if (done == place.bytes) return aligned;
  throw std::runtime_error("reading a block of " + what + " in '" + *place.folder +
                           "' failed: " + (done < 0 ? std::strerror(errno) : "the file has been truncated"));
}

void Staging::write_behind(const void* owner) {
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.key.owner == owner && slot.leases == 0 && slot.state == State::dirty) start(slot, /*read=*/false);
  }
}

void Staging::close(Key key, bool changed) noexcept {
  std::lock_guard lock(mutex_);
  Slot* slot = find(key);
  if (slot == nullptr) return;
  --slot->leases;
  if (changed) slot->state = State::dirty;
}

void Staging::forget(const void* owner) noexcept {
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.key.owner != owner || slot.state == State::empty) continue;
    if (slot.state == State::reading || slot.state == State::writing) result_of(slot);
    slot.state = State::empty;
  }
}

void Staging::prefetch(Key key, const DiskPlace& place, const std::string& what) {
  std::lock_guard lock(mutex_);
  Slot* slot = find(key);
  if (slot == nullptr) {
    slot = idle_slot();
    if (slot == nullptr) return;
    lend(*slot, key, place, what);
    start(*slot, /*read=*/true);
  }
  slot->last_use = ++clock_;
}

}  // namespace deeptide::tiers
