// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names what limits a step, from what all ranks say about their time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/reports.h"

namespace deeptide::report {

enum class Limit : uint8_t { compute, memory, network, late_rank, files, data, stages };
/// "compute", "memory", "network", "waiting for a rank", "files", "data", "waiting": for other stages.
const char* text(Limit limit);

/// Means over some steps.
struct LimitFacts {
  std::vector<StepTimes> times;  // by the team's index
  std::vector<int> ranks;        // of the world, likewise
  bool has_stages = false;       // whether the team is one stage of a pipeline: its ranks wait for other stages, too
  double memory_bound = -1.0;    // share of forward's and backward's operators that memory limits; -1: unknown
  double flops_share = -1.0;     // of the machine's measured peak, while computing; -1: unknown
  double bytes_per_s = 0.0;      // of those operators; 0: unknown
  double triad = 0.0;            // the machine's measured bandwidth; 0: unknown
  std::string slow_link;         // "from rank 1 on b to rank 0 on a, 11.2 MiB/s (others 100 MiB/s)"; empty: none
};

struct LimitFound {
  Limit limit = Limit::compute;
  int rank = -1;     // of the world, if one rank causes it
  double share = 0;  // of a step
  std::string text;  // for people: figures, and the setting that would help
};

/// Waits for a rank come first if they take a tenth of a step, since all others lose that time. Then network, files or
/// data, if one of them takes a fifth. What is left is computing. Nothing is known of an empty step.
LimitFound find_limit(const LimitFacts& facts);

}  // namespace deeptide::report
