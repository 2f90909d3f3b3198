// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs jobs whose ranks mpirun or srun starts: this process supervises the starter, each `deeptide rank` its rank.
#pragma once

#include <string>
#include <vector>

#include "launch/machine/held_port.h"
#include "launch/plan/exports.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

struct Starter {
  std::vector<std::string> command;
  Environment environment;  // for the starter, which forwards the exported part by name
  HeldPort port;            // where all ranks are on this machine
};

/// Builds the starter's command. `look`: asks the first host for its address if --master_addr is not given. `hub`: the
/// value of kHubVariable for the ranks; empty: none.
/// Errors: UsageError if the starter is missing or cannot do what the options ask, or the host does not answer.
Starter make_starter(const Options& options, const std::vector<Host>& hosts, bool look, const std::string& hub = {});

/// Runs the job. Returns the starter's exit code, or 128 + signal as Supervisor does.
int run_starter(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
