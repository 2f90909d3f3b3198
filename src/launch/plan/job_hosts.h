// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where a job runs, decided from the options, the hostfile and this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"

namespace deeptide::launch {

struct JobHosts {
  enum class Way : uint8_t {
    here,     // ranks of this machine only: children of this process
    agents,   // an agent on each host
    starter,  // mpirun or srun starts the ranks
  };

  Way way = Way::here;
  std::vector<Host> hosts;  // for agents and starter; may be empty for srun, which has its own list
  HostPlace place;          // here
  std::vector<std::string> warnings;
};

/// True if a hostfile is given, or exists at the default path.
bool has_hostfile(const Options& options);

/// Errors: UsageError for a bad hostfile, unknown hosts or slots, options that do not go together.
JobHosts find_hosts(const Options& options);

}  // namespace deeptide::launch
