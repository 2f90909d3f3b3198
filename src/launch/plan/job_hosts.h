// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides where a job runs, from the options, the hostfile and this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/machine/held_port.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"

namespace deeptide::launch {

struct JobHosts {
  enum class Way : uint8_t {
    here,     // all ranks are children of this process
    agents,   // one agent per host
    starter,  // mpirun or srun starts the ranks
  };

  Way way = Way::here;
  std::vector<Host> hosts;  // for agents and starter; may be empty for srun, which knows its own hosts
  HostPlace place;          // for `here`
  HeldPort port;            // for `here`, where rank 0 is on this host
  std::vector<std::string> warnings;
};

/// True if a hostfile is given, or exists at the default path.
bool has_hostfile(const Options& options);

/// Errors: UsageError for a bad hostfile, unknown hosts or slots, or options that cannot be combined.
JobHosts find_hosts(const Options& options);

}  // namespace deeptide::launch
