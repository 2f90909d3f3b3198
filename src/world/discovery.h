// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads from the environment which rank this process is, whatever launched it. Needs no torch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "deeptide/discovery.h"

namespace deeptide::world {

/// Where variables and the host's name come from; the real one, or a test's.
struct Environment {
  std::function<std::optional<std::string>(const std::string&)> variable;  // nothing when unset or empty
  std::function<std::string()> host_name;                                  // fully qualified where that is known

  static Environment of_process();
};

/// A process among the hosts of its job, as far as the launcher's variables say.
struct Placement {
  Discovery place;
  int local_size = 0;  // ranks on this host; 0: unknown
  int node_rank = -1;  // this host among the hosts; -1: unknown
  int num_nodes = 0;   // 0: unknown
};

/// Finds this process. Returns nothing if no launcher has set its variables: a world of one.
/// `default_port` serves when neither MASTER_PORT nor a job's number gives one.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other, with their values.
std::optional<Placement> discover_placement(const Environment& environment, int default_port);

/// The same without the hosts.
std::optional<Discovery> discover(const Environment& environment, int default_port);

}  // namespace deeptide::world
