// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes what a rank is doing, read from outside: its ring, its process, its stacks.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "launch/process/flight_files.h"

namespace deeptide::launch {

struct CollectiveState {
  std::string operation, channel, phase, unit, parameter;
  int64_t step = 0;
  int64_t bytes = 0;
  uint64_t sequence = 0;
  double waited_s = 0.0;
};

struct Issued {
  uint64_t sequence = 0;
  std::string operation;
};

/// A link over the network that is slower than the others, from rank to rank.
struct LinkState {
  int from = -1;
  int to = -1;
  int64_t bytes_per_s = 0;
  int64_t others = 0;  // their median, in bytes/s
};

struct RankState {
  int rank = 0;
  std::string host;    // empty: this machine
  pid_t pid = 0;       // the training process; 0: it has not started
  char process = '?';  // as in /proc/PID/stat: R, S, D, T (stopped), Z (ended); X: gone
  int64_t step = 0;    // where it computes; empty phase: not entered
  std::string phase, module;
  std::optional<CollectiveState> waiting;       // the collective with the longest wait
  std::map<std::string, Issued> newest;         // by channel: the last one issued
  double silent_s = 0.0;                        // since it last issued or completed a collective, or entered a module
  std::array<int, 5> mesh{};                    // sizes of the job's axes, as world::Mesh has them; 0: not known
  std::optional<LinkState> slow_link;           // of the job, as its ranks agreed in their last step
  std::string stacks;                           // empty: not requested
  std::optional<trace::FlightFacts> last_step;  // only if requested, and known
  uint64_t traced = 0;                          // the last request for a timeline that the rank is done with
};

/// The rank's last step, of which it tells only while it is watched.
std::optional<trace::FlightFacts> read_last_step(const FlightFiles& files);

/// Reads the ring and the process. `pid`: the started process, used until the training process has started.
RankState read_state(int rank, pid_t pid, const FlightFiles& files);

}  // namespace deeptide::launch
