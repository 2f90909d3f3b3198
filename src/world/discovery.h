// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Determines this process's rank from the environment of any launcher, without torch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "deeptide/discovery.h"

namespace deeptide::world {

/// Gives the variables and the host's name: those of the process, or a test's.
struct Environment {
  std::function<std::optional<std::string>(const std::string&)> variable;  // empty if the variable is unset or empty
  std::function<std::string()> host_name;                                  // fully qualified if known

  static Environment of_process();
};

/// The place of a process among its job's hosts, as far as the launcher's variables describe it.
struct Placement {
  Discovery place;
  int local_size = 0;  // ranks on this host; 0: unknown
  int node_rank = -1;  // index of this host; -1: unknown
  int num_nodes = 0;   // 0: unknown
};

/// Finds the place of this process. Returns nothing for a world of one, if no launcher has set its variables.
/// `default_port` applies if neither MASTER_PORT nor a job's id gives a port.
/// Errors: ConfigError listing the missing, malformed or contradictory variables with their values.
std::optional<Placement> discover_placement(const Environment& environment, int default_port);

/// Does as discover_placement, but returns only the discovery.
std::optional<Discovery> discover(const Environment& environment, int default_port);

}  // namespace deeptide::world
