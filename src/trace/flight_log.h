// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records the last collectives of this process's ranks in a ring, which stays readable when a rank is stopped or dead.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "trace/flight_ring.h"

namespace deeptide::trace {

/// Description of a collective.
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

/// The launcher asks for a timeline of the next `num_steps` steps; 0: ends the one under way.
struct TraceWish {
  uint64_t number = 0;
  int64_t num_steps = 0;
  std::string folder;
};

/// Lock-free and callable from any thread. Never throws. Takes about 50 ns per call. Ranks as threads share one log. A
/// forked child shares the ring with its parent and records nothing there, because its engines refuse every call.
class FlightLog {
 public:
  using Ticket = uint64_t;  // 0: none; calls with it have no effect

  /// Writes to `ring`, which must outlive the log.
  explicit FlightLog(FlightRing& ring);

  /// Records that a collective is issued. Returns 0 where the ring is so full that another thread still writes the
  /// entry that would be reused.
  Ticket begin(const Flight& flight) noexcept;
  /// Records that a thread now waits for the collective. One call per collective is enough.
  void waiting(Ticket ticket) noexcept;
  /// Records the wait and its place, which was unknown to `begin` for a collective that was issued early.
  void waiting(Ticket ticket, int64_t step, std::string_view phase, std::string_view unit) noexcept;
  /// Records that the collective is complete or abandoned. Ignores an entry that the ring has since reused.
  void end(Ticket ticket) noexcept;
  /// Records where the rank computes: call it on entry to a unit, in forward and in backward.
  void enter(int64_t step, std::string_view phase, std::string_view module) noexcept;

  /// Records the link over the network that ranks agree is slow; see FlightLink.
  void slow_link(int from, int to, double bytes_per_s, double others) noexcept;

  /// Records how the ranks are arranged; see FlightMesh.
  void mesh(const std::array<int, 5>& sizes) noexcept;

  /// Whether `deeptide top` looks at this rank now.
  bool is_watched() const noexcept;
  void note_step(const FlightFacts& facts) noexcept;
  /// The launcher's last request, if it is not `seen`. One load if there is none.
  std::optional<TraceWish> trace_wish(uint64_t seen) const;
  /// The request is done: its file is written, or cannot be.
  void traced(uint64_t number) noexcept { ring_.wish.traced.store(number, std::memory_order_release); }
  uint64_t last_traced() const noexcept { return ring_.wish.traced.load(std::memory_order_relaxed); }

 private:
  FlightEntry* entry_of(Ticket ticket) noexcept;

  FlightRing& ring_;
};

/// Returns the process's log: in the launcher's memory if DEEPTIDE_FLIGHT_FD names it, else in private memory.
FlightLog& flight_log();

}  // namespace deeptide::trace
