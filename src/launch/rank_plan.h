// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What each rank runs: command, environment and cores, decided before anything starts.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "launch/options.h"

namespace deeptide::launch {

struct RankPlan {
  int rank = 0;
  std::vector<std::string> command;                // the first is the path of the executable
  std::map<std::string, std::string> environment;  // set on top of the launcher's own
  std::vector<int> cores;                          // bound to these; empty: unbound
};

/// One plan a rank, with port, interpreter and number of ranks resolved.
/// Errors: UsageError if the script or program does not exist, or there are fewer cores than ranks to bind them to.
std::vector<RankPlan> plan_ranks(const Options& options);

/// The plan as a line that a shell would run.
std::string to_shell(const RankPlan& plan);

}  // namespace deeptide::launch
