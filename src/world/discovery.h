// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reading from the environment which rank this process is, whoever launched it. Needs no torch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// Where variables and the host's name come from; the real one, or a test's.
struct Environment {
  std::function<std::optional<std::string>(const std::string&)> variable;  // nothing when unset or empty
  std::function<std::string()> host_name;                                  // fully qualified where that is known

  static Environment of_process();
};

/// Who this process is. Nothing when no launcher left a trace: a world of one.
/// `default_port` serves when neither MASTER_PORT nor a job's number gives one.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other, with their values.
std::optional<Discovery> discover(const Environment& environment, int default_port);

}  // namespace deeptide::world
