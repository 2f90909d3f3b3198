// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parses the words of a command with CLI11.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace deeptide::launch {

/// Replaces the usage line of --help, because CLI11 does not know the words that follow the options.
void set_usage(CLI::App& app, const std::string& line);

/// Returns nothing if `app` parsed the words, or the exit code if it answered --help or --version.
/// Errors: UsageError, prefixed with the name of the subcommand.
std::optional<int> parse_arguments(CLI::App& app, std::vector<std::string> arguments);

}  // namespace deeptide::launch
