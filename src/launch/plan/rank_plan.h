// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The command, environment and cores of each rank of one host, decided before any rank starts.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/command.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

struct RankPlan {
  int rank = 0;
  Command command;
};

/// One host's place in a job.
struct HostPlace {
  int node_rank = 0;
  int num_nodes = 1;
  int first_rank = 0;
  int num_ranks = 1;
  int world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::vector<int> devices;  // visible to the ranks; empty: as in the environment
  Environment environment;   // for each rank: exported variables, the job's token
};

/// Returns one plan per rank. On the host itself (`here`), looks up the interpreter, the script and the cores; a
/// printed plan keeps them as given. Errors: UsageError if the script or program does not exist, or if there are fewer
/// cores than ranks to bind.
std::vector<RankPlan> plan_ranks(const RankOptions& options, const HostPlace& place, bool here = true);

/// Returns how many ranks the options ask for on this machine, by default one per device.
int resolve_num_ranks(const Options& options);

/// True if Python runs the script.
bool runs_python(const RankOptions& options);

}  // namespace deeptide::launch
