// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// CLI11's outcomes as ours.
#include "launch/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>

#include "launch/options.h"

namespace deeptide::launch {

std::optional<int> parse_arguments(CLI::App& app, Arguments arguments) {
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::Success& answered) {
    return app.exit(answered, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    throw UsageError(app.get_name() + ": " + error.what());
  }
  return std::nullopt;
}

int run_reporting(const std::function<int()>& work) {
  try {
    return work();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kExitUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kExitCannotStart;
  }
}

}  // namespace deeptide::launch
