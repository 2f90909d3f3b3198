// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a job over several hosts with all its restarts.
#pragma once

#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Runs the job over agents on `hosts`. Restarts an elastic job up to --max_restarts times, each time on the hosts that
/// can be reached then. Returns the exit code of the job.
int run_over_agents(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
