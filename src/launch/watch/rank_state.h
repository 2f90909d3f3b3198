// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What a rank is doing, read from outside: its ring, its process, its stacks.
#pragma once

#include <sys/types.h>

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

struct RankState {
  int rank = 0;
  std::string host;    // empty: this one
  pid_t pid = 0;       // of the process that trains; 0: it has not started
  char process = '?';  // as in /proc/PID/stat: R, S, D, T (stopped), Z (ended); X: gone
  int64_t step = 0;    // where it computes; empty phase: not entered
  std::string phase, module;
  std::optional<CollectiveState> waiting;  // the one that a thread has waited for longest
  std::map<std::string, Issued> newest;    // by channel, the last that it has issued
  double silent_s = 0.0;                   // since it last issued or ended a collective, or entered a module
  std::string stacks;                      // empty: not asked for
};

/// Reads ring and process. `pid`: the process that was started; it is used until a trainer has started.
RankState read_state(int rank, pid_t pid, const FlightFiles& files);

}  // namespace deeptide::launch
