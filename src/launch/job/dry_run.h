// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// --dry-run of a job over several hosts: prints the commands; starts nothing and connects to no host.
#pragma once

#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Prints the command that reaches each host, and the command of each rank there. Returns the exit code.
int print_agents(const Options& options, const std::vector<Host>& hosts);

/// Prints the starter's command with its variables.
int print_starter(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
