// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints the commands of a job over several hosts for --dry-run, without starting or connecting to anything.
#pragma once

#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Prints the command that reaches each host and the commands of its ranks. Returns the exit code.
int print_agents(const Options& options, const std::vector<Host>& hosts);

/// Prints the starter's command with its variables.
int print_starter(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
