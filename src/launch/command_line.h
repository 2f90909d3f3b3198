// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What commands share: parsing their words, and telling what went wrong.
#pragma once

#include <functional>
#include <optional>

#include "launch/commands.h"

namespace CLI {
class App;
}

namespace deeptide::launch {

/// Nothing when all is well; the exit code when --help was answered. Errors: UsageError.
std::optional<int> parse_arguments(CLI::App& app, Arguments arguments);

/// The exit code of `work`; an exception's text goes to standard error.
int run_reporting(const std::function<int()>& work);

}  // namespace deeptide::launch
