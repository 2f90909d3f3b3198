// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A ring of slots per rank in shared memory, with counters of what is posted and what all ranks have read. Ranks of one
// host exchange anything with it, without a lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "host/host.h"

namespace deeptide::host {

/// Each rank fills its own slots in order and reads all ranks' slots. Slot n may be refilled (as n + num_slots) once
/// all ranks have read it. One thread per rank at a time. Counts start at 0 and wrap around at 2^32, which the number
/// of slots divides.
class Ring {
 public:
  /// Collective in the sense of Host::reserve: constructed in the same order on all ranks of the host.
  Ring(std::shared_ptr<Host> host, int num_slots, int64_t slot_bytes);

  int size() const { return size_; }
  int index() const { return index_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int num_slots() const { return num_slots_; }

  /// Returns this rank's next slot; null while some rank has not read its current content. Errors: RuntimeError if
  /// there is too little memory for it.
  char* next_slot();
  /// Publishes the slot from `next_slot` to all ranks; returns its number.
  uint32_t post();
  uint32_t num_posted() const;
  /// Pretends that this rank posted and read `count` slots. For tests of the wrap: on all ranks, before any other use.
  void start_at(uint32_t count);

  /// Returns what `peer` put into slot `number`; readable once posted.
  const char* slot(int peer, uint32_t number) const;
  bool is_posted(int peer, uint32_t number) const;
  bool all_posted(uint32_t number) const;
  /// Reports that this rank has read all ranks' slots up to `number`.
  void set_read(uint32_t number);
  bool all_read(uint32_t number) const;

  /// Wait until the condition holds, at most `limit`: spin briefly if each rank has a core, else yield the core; then
  /// sleep. Errors: TransportError if a rank of the host has ended and the condition does not hold.
  bool wait_posted(uint32_t number, std::chrono::milliseconds limit);
  bool wait_read(uint32_t number, std::chrono::milliseconds limit);

 private:
  struct Counters;

  Counters& counters(int peer) const;
  void take_pages(const char* next);
  template <typename Word>
  bool wait_all(Word Counters::*word, uint32_t number, std::chrono::milliseconds limit);

  std::shared_ptr<Host> host_;
  int size_;
  int index_;
  int num_slots_;
  int64_t slot_bytes_;
  char* counters_;
  char* slots_;
  int64_t taken_ = 0;  // bytes of this rank's slots whose pages are there
};

}  // namespace deeptide::host
