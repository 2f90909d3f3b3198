// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the memory that a rank shares with the launcher, without torch: its last collectives, its place, its last
// step; and what the launcher asks of it.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstdint>

namespace deeptide::trace {

/// The launcher makes a memfd of sizeof(FlightRing) per rank, writes kFlightMagic, and passes its number to the rank.
inline constexpr const char* kFlightVariable = "DEEPTIDE_FLIGHT_FD";
inline constexpr const char* kStacksVariable = "DEEPTIDE_STACKS_FD";  // the file that a signal handler writes stacks to
inline constexpr uint64_t kFlightMagic = 0x35'54'48'47'4c'46'54'44;   // "DTFLGHT5"; another layout gets another digit
inline constexpr int kFlightEntries = 256;

/// Signals on which a rank writes its Python stacks, or the receiving thread's native stack, to the stacks' file. They
/// are near the end of the real-time range, which programs rarely use, and are sent only to processes that catch them.
inline int python_stacks_signal() { return SIGRTMAX - 7; }
inline int native_stack_signal() { return SIGRTMAX - 6; }

/// One collective. Times are CLOCK_MONOTONIC_COARSE in ns, 0 until the event has happened. Text is truncated and ends
/// with a 0.
struct FlightEntry {
  std::atomic<uint64_t> number{0};  // counts from 1 over all entries of the rank; 0 while the entry is being written
  std::atomic<int64_t> started_ns{0};
  std::atomic<int64_t> waiting_ns{0};  // start of the first wait
  std::atomic<int64_t> finished_ns{0};
  uint64_t sequence = 0;  // counts from 1 within its channel, equal on all ranks
  int64_t step = 0;
  int64_t bytes = 0;
  int32_t rank = 0;
  char operation[20] = {};  // "reduce-scatter"
  char channel[16] = {};    // "reductions"
  char phase[16] = {};      // "backward"
  char unit[48] = {};       // "h.12.mlp"
  char parameter[64] = {};  // the unit's first parameter
};

/// The rank's position between collectives. `version` is odd while it is being written.
struct FlightPlace {
  std::atomic<uint64_t> version{0};
  int64_t step = 0;
  char phase[16] = {};
  char module[64] = {};
};

/// The link over the network that is slow, as all ranks agreed in the last step.
struct FlightLink {
  std::atomic<int32_t> from{-1};  // rank; -1: no link is slow
  std::atomic<int32_t> to{-1};
  std::atomic<int64_t> bytes_per_s{0};
  std::atomic<int64_t> others{0};  // the median of the other links, in bytes/s
};

/// The step that ended last. Times of this rank in s, without waits for files and ranks where they are `computing`.
struct FlightFacts {
  int64_t step = 0;  // 0: none has ended since someone watches
  int64_t skipped_steps = 0;
  int64_t samples = 0;       // of all ranks so far
  int64_t train_batch = 0;   // samples of all ranks in a step
  int64_t tokens = 0;        // of this rank in the step; 0: the program told none
  int64_t memory_bytes = 0;  // that the engine holds now
  double loss = 0.0;         // NaN: unknown
  double norm = 0.0;
  double lr = 0.0;
  double total_s = 0.0;  // 0: the step began before someone watched
  double computing_s = 0.0;
  double waiting_s = 0.0;
  double files_s = 0.0;
  double data_s = 0.0;
  double optimizer_s = 0.0;  // of computing_s
  double sent_bytes = 0.0;   // to other ranks in the step
  double flops = 0.0;        // of the operators of one step since someone watches; 0: not counted yet
  double moved_bytes = 0.0;  // likewise, read and written
  char limit[480] = {};      // on the first rank: the line that says what limits a step
};

/// Written only while someone watches. `version` is odd while it is being written.
struct FlightStep {
  std::atomic<uint64_t> version{0};
  FlightFacts facts;
};

/// The launcher's wishes to the rank, which looks once per step.
struct FlightWish {
  std::atomic<int64_t> watched_until_ns{0};  // CLOCK_MONOTONIC_COARSE
  std::atomic<uint64_t> trace_number{0};     // grows with each request for a timeline, stored after the fields below
  std::atomic<int64_t> trace_steps{0};       // 0: end the one under way
  char trace_folder[256] = {};
  std::atomic<uint64_t> traced{0};  // by the rank: the last request that is done
};

/// How the job's ranks are arranged: the sizes of world::Mesh's axes. 0: not known yet.
struct FlightMesh {
  std::atomic<int32_t> sizes[5] = {};
};

struct FlightRing {
  std::atomic<uint64_t> magic{0};
  std::atomic<int32_t> pid{0};            // the writing process; 0: none yet
  std::atomic<int32_t> rank{-1};          // rank of the last entry
  std::atomic<uint64_t> last_number{0};   // number of the newest entry; entry n is entries[(n - 1) % kFlightEntries]
  std::atomic<int64_t> last_event_ns{0};  // time of the last write
  FlightPlace place;
  FlightMesh mesh;
  FlightLink slow_link;
  FlightStep last_step;
  FlightWish wish;
  FlightEntry entries[kFlightEntries];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "the ring is read by another process");

}  // namespace deeptide::trace
