// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which of the hosts that can be reached an elastic job uses.
#pragma once

#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"

namespace deeptide::launch {

/// The file after --deepspeed_config, --deepspeed or --config among a script's arguments; empty if there is none.
std::string config_argument(const std::vector<std::string>& command);

/// At most --max_elastic_nodes of `reached`, and of their slots as many as the elasticity section of the script's
/// configuration allows, if it has one; slots go from the last host. Empty: no allowed number is small enough.
/// Errors: ConfigError, as the script itself would have it.
std::vector<Host> elastic_hosts(const Options& options, std::vector<Host> reached);

/// `hosts` without their last slots, so that `count` are left; hosts without slots are dropped.
std::vector<Host> first_slots(std::vector<Host> hosts, int count);

}  // namespace deeptide::launch
