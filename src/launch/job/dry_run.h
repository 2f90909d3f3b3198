// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// --dry-run of a job over several hosts: what would be run, printed, nothing started or connected to.
#pragma once

#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// The command that reaches each host, and what each rank there runs. Returns the exit code.
int print_agents(const Options& options, const std::vector<Host>& hosts);

/// The starter's command with the variables that it is given.
int print_starter(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
