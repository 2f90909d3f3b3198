// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A job over several hosts with all its restarts.
#pragma once

#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Runs the job over agents on `hosts`. An elastic job is started again on the hosts that can be reached then, up to
/// --max_restarts times. Returns the exit code to pass on.
int run_over_agents(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
