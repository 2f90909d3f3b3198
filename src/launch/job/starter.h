// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Jobs whose ranks mpirun or srun starts; this process watches over the starter, each `deeptide rank` over its rank.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/exports.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

struct Starter {
  std::vector<std::string> command;
  Environment environment;  // for the starter, which passes the exported part on by name
};

/// With `look`, the first host is asked for its address where --master_addr is not given. `hub`: where ranks find the
/// launcher (see kHubVariable); empty: nowhere.
/// Errors: UsageError if the starter is missing or cannot do what the options ask, or the host does not answer.
Starter make_starter(const Options& options, const std::vector<Host>& hosts, bool look, const std::string& hub = {});

/// Runs the job. Returns the starter's exit code, or 128 + signal as Supervisor does.
int run_starter(const Options& options, const std::vector<Host>& hosts);

}  // namespace deeptide::launch
