// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Joins what a program and its launcher state about the world; C++ and Python share it.
#pragma once

#include <chrono>
#include <optional>

#include "deeptide/discovery.h"
#include "world/discovery.h"

namespace deeptide::world {

/// Returns where the options put this process; the launcher's variables fill in what they omit. Nothing: neither places
/// it, a world of one. Errors: ConfigError for options that conflict, and as `discover`.
std::optional<Discovery> find_place(const Environment& environment, const DistributedOptions& options);

/// Errors: ConfigError if the option or DEEPSPEED_TIMEOUT is not a valid duration.
std::chrono::milliseconds timeout_of(const Environment& environment, const DistributedOptions& options);

}  // namespace deeptide::world
