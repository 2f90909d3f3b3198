// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The memory that a rank shares with its launcher: its last collectives and where it is. Needs no torch.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstdint>

namespace deeptide::trace {

/// The launcher makes a memfd of sizeof(FlightRing) per rank, writes kFlightMagic, and passes the file number on.
inline constexpr const char* kFlightVariable = "DEEPTIDE_FLIGHT_FD";
inline constexpr const char* kStacksVariable = "DEEPTIDE_STACKS_FD";  // a file that a signal handler writes stacks to
inline constexpr uint64_t kFlightMagic = 0x31'54'48'47'4c'46'54'44;   // "DTFLGHT1"; another layout gets another digit
inline constexpr int kFlightEntries = 256;

/// On these signals a rank writes its Python stacks, or the receiving thread's native stack, to the stacks' file.
/// Real-time signals near the end of their range, which programs leave alone; sent only to processes that catch them.
inline int python_stacks_signal() { return SIGRTMAX - 7; }
inline int native_stack_signal() { return SIGRTMAX - 6; }

/// One collective. Times are CLOCK_MONOTONIC_COARSE in ns, 0 until the event has happened. Text is truncated and ends
/// with a 0.
struct FlightEntry {
  std::atomic<uint64_t> number{0};  // counts from 1 over all of the rank's entries; 0 while it is being written
  std::atomic<int64_t> started_ns{0};
  std::atomic<int64_t> waiting_ns{0};  // when a thread began to wait for it
  std::atomic<int64_t> finished_ns{0};
  uint64_t sequence = 0;  // counts from 1 within its channel, equal on all ranks
  int64_t step = 0;
  int64_t bytes = 0;
  int32_t rank = 0;
  char operation[20] = {};  // "reduce-scatter"
  char channel[16] = {};    // "reductions"
  char phase[16] = {};      // "backward"
  char unit[48] = {};       // "h.12.mlp"
  char parameter[64] = {};  // the unit's first
};

/// Where the rank is between collectives. `version` is odd while it is being written.
struct FlightPlace {
  std::atomic<uint64_t> version{0};
  int64_t step = 0;
  char phase[16] = {};
  char module[64] = {};
};

struct FlightRing {
  std::atomic<uint64_t> magic{0};
  std::atomic<int32_t> pid{0};            // the writing process; 0: none has arrived yet
  std::atomic<int32_t> rank{-1};          // rank of the last entry
  std::atomic<uint64_t> last_number{0};   // of the newest entry; entry n lies at entries[(n - 1) % kFlightEntries]
  std::atomic<int64_t> last_event_ns{0};  // when anything was written
  FlightPlace place;
  FlightEntry entries[kFlightEntries];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "the ring is read by another process");

}  // namespace deeptide::trace
