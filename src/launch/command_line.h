// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parsing the words of one command.
#pragma once

#include <optional>

#include "launch/commands.h"

namespace CLI {
class App;
}

namespace deeptide::launch {

/// Nothing when all is well; the exit code when --help was answered. Errors: UsageError.
std::optional<int> parse_arguments(CLI::App& app, Arguments arguments);

}  // namespace deeptide::launch
