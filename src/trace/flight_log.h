// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What this process's ranks have been doing: a ring of their last collectives, which outlives a stopped or dead rank.
#pragma once

#include <cstdint>
#include <string_view>

#include "trace/flight_ring.h"

namespace deeptide::trace {

/// What a collective reports about itself.
struct Flight {
  std::string_view operation;  // "all-gather"
  std::string_view channel;    // "gathers"
  std::string_view phase;      // "forward"
  std::string_view unit;
  std::string_view parameter;
  int64_t step = 0;
  int64_t bytes = 0;
  uint64_t sequence = 0;  // within the channel, from 1
  int rank = 0;
};

/// Lock-free, from any thread, never throws; about 50 ns per call. Ranks as threads share their process's log.
class FlightLog {
 public:
  using Ticket = uint64_t;  // 0: none; calls with it do nothing

  /// Writes to `ring`, which must outlive the log.
  explicit FlightLog(FlightRing& ring);

  /// Records that a collective is issued.
  Ticket begin(const Flight& flight) noexcept;
  /// Records that a thread now only waits for it. One call per collective is enough.
  void waiting(Ticket ticket) noexcept;
  /// Records the wait and its place, which `begin` could not know of a collective issued ahead of need.
  void waiting(Ticket ticket, int64_t step, std::string_view phase, std::string_view unit) noexcept;
  /// Records that it is complete or abandoned. Ignores an entry that the ring has since reused.
  void end(Ticket ticket) noexcept;
  /// Records where the rank computes: call it on entry to a unit, in forward and in backward.
  void enter(int64_t step, std::string_view phase, std::string_view module) noexcept;

 private:
  FlightEntry* entry_of(Ticket ticket) noexcept;

  FlightRing& ring_;
};

/// The process's log: in the launcher's memory when DEEPTIDE_FLIGHT_FD names it, else in plain memory.
FlightLog& flight_log();

}  // namespace deeptide::trace
