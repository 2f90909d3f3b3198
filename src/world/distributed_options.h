// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What a program says of its world, joined with what its launcher says; the same for C++ and Python.
#pragma once

#include <chrono>
#include <optional>

#include "deeptide/discovery.h"
#include "world/discovery.h"

namespace deeptide::world {

/// Where the options put this process and, where they are silent, the launcher's variables. Nothing: neither does, a
/// world of one. Errors: ConfigError for options that do not go together, and as `discover`.
std::optional<Discovery> find_place(const Environment& environment, const DistributedOptions& options);

/// Errors: ConfigError when the option or DEEPSPEED_TIMEOUT is no time to wait.
std::chrono::milliseconds timeout_of(const Environment& environment, const DistributedOptions& options);

}  // namespace deeptide::world
