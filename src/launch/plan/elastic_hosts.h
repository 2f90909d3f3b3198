// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Chooses the hosts of an elastic job among those that can be reached.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// Returns the file after --deepspeed_config, --deepspeed or --config in a script's arguments; empty if there is none.
std::string config_argument(const std::vector<std::string>& command);

/// Returns at most --max_elastic_nodes hosts of `reached`. If the script's configuration has an elasticity section,
/// keeps the largest number of slots that it allows and drops slots from the last host on. Empty: every allowed number
/// is too large. Errors: ConfigError, as in the script itself.
std::vector<Host> elastic_hosts(const Options& options, std::vector<Host> reached);

/// Keeps the first `count` slots of `hosts` and drops hosts without slots.
std::vector<Host> first_slots(std::vector<Host> hosts, int count);

}  // namespace deeptide::launch
