// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A ring of slots a rank in shared memory, with counters that say what is posted and what everybody has read: all that
// ranks of one host need to exchange anything, without a lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "host/host.h"

namespace deeptide::host {

/// Each rank fills its own slots in order and reads everybody's. Slot n may be filled again (as n + num_slots) once all
/// ranks have read it. One thread of a rank at a time. Counts start at 0 and wrap around at 2^32, of which the number
/// of slots is a divisor.
class Ring {
 public:
  /// Collective in the sense of Host::reserve: made in the same order on all ranks of the host.
  Ring(std::shared_ptr<Host> host, int num_slots, int64_t slot_bytes);

  int size() const { return size_; }
  int index() const { return index_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int num_slots() const { return num_slots_; }

  /// This rank's next slot; null while someone has not read what it holds.
  char* next_slot();
  /// Shows the slot from `next_slot` to all; returns its number.
  uint32_t post();
  uint32_t num_posted() const;
  /// As if this rank had posted and read `count` slots. For tests of the wrap: on all ranks, before any other use.
  void start_at(uint32_t count);

  /// What `peer` put into slot `number`; readable once it is posted.
  const char* slot(int peer, uint32_t number) const;
  bool is_posted(int peer, uint32_t number) const;
  bool all_posted(uint32_t number) const;
  /// Tells that this rank has read everybody's slots up to `number`.
  void set_read(uint32_t number);
  bool all_read(uint32_t number) const;

  /// Sleep until the condition holds, at most `limit`; before, spin a moment where each rank has a core, or let others
  /// have this one. Errors: TransportError when a rank of the host has ended and the condition does not hold.
  bool wait_posted(uint32_t number, std::chrono::milliseconds limit);
  bool wait_read(uint32_t number, std::chrono::milliseconds limit);

 private:
  struct Counters;

  Counters& counters(int peer) const;
  template <typename Word>
  bool wait_all(Word Counters::*word, uint32_t number, std::chrono::milliseconds limit);

  std::shared_ptr<Host> host_;
  int size_;
  int index_;
  int num_slots_;
  int64_t slot_bytes_;
  char* counters_;
  char* slots_;
};

}  // namespace deeptide::host
