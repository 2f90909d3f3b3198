// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A rank without torch: writes its ring as a training would, one of them late, and stays there until it is ended.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "trace/flight_log.h"

using deeptide::trace::Flight;
using deeptide::trace::flight_log;

// Exported and never inlined, so that its name stands in a native stack.
extern "C" __attribute__((noinline, visibility("default"))) void compute_for_ever() {
  while (true) ::usleep(10'000);
}

// flight_rank LATE_RANK: that rank stops before reduce-scatter 311, the others wait for 314.
int main(int, char** arguments) {
  const int rank = std::atoi(std::getenv("RANK")), late = std::atoi(arguments[1]);
  const auto flight = [rank](uint64_t sequence) {
    return Flight{"reduce-scatter", "reductions", "backward", "h.11", "h.11.mlp.weight", 7, 3 << 20, sequence, rank};
  };
  const uint64_t last = rank == late ? 310 : 313;
  for (uint64_t sequence = 1; sequence <= last; ++sequence) flight_log().end(flight_log().begin(flight(sequence)));
  flight_log().enter(7, "backward", "h.12.mlp");
  if (rank != late) flight_log().waiting(flight_log().begin(flight(314)));
  std::printf("pid %d\n", ::getpid());
  std::fflush(stdout);
  compute_for_ever();
}
