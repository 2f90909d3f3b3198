// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads from the environment which rank this process is, whatever launched it. Needs no torch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "deeptide/discovery.h"

namespace deeptide::world {

/// The source of variables and of the host's name: the real environment, or a test's.
struct Environment {
  std::function<std::optional<std::string>(const std::string&)> variable;  // nothing if unset or empty
  std::function<std::string()> host_name;                                  // fully qualified if known

  static Environment of_process();
};

/// A process among its job's hosts, as far as the launcher's variables describe it.
struct Placement {
  Discovery place;
  int local_size = 0;  // ranks on this host; 0: unknown
  int node_rank = -1;  // index of this host; -1: unknown
  int num_nodes = 0;   // 0: unknown
};

/// Finds this process. Returns nothing if no launcher has set its variables: a world of one. `default_port` serves if
/// neither MASTER_PORT nor a job's number gives a port.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other, with their values.
std::optional<Placement> discover_placement(const Environment& environment, int default_port);

/// As discover_placement, without the hosts.
std::optional<Discovery> discover(const Environment& environment, int default_port);

}  // namespace deeptide::world
