// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Combines the program's options with the launcher's variables, for C++ and Python alike.
#pragma once

#include <chrono>
#include <optional>

#include "deeptide/discovery.h"
#include "world/discovery.h"

namespace deeptide::world {

/// Returns the place of this process from the options, completed by the launcher's variables. Returns nothing for a
/// world of one, if neither gives a place. Errors: ConfigError for conflicting options, and as `discover`.
std::optional<Discovery> find_place(const Environment& environment, const DistributedOptions& options);

/// Errors: ConfigError if the option or DEEPSPEED_TIMEOUT is not a valid duration.
std::chrono::milliseconds timeout_of(const Environment& environment, const DistributedOptions& options);

}  // namespace deeptide::world
