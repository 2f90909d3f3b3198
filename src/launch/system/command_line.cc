// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns CLI11's outcomes into exit codes and UsageErrors.
#include "launch/system/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "launch/system/usage_error.h"

namespace deeptide::launch {

namespace {

class UsageLine : public CLI::Formatter {
 public:
  explicit UsageLine(std::string line) : line_(std::move(line)) {}
  std::string make_usage(const CLI::App*, std::string) const override { return "Usage: " + line_ + "\n"; }

 private:
  std::string line_;
};

}  // namespace

void set_usage(CLI::App& app, const std::string& line) { app.formatter(std::make_shared<UsageLine>(line)); }

std::optional<int> parse_arguments(CLI::App& app, std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::Success& answered) {
    return app.exit(answered, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    const bool subcommand = app.get_name().find(' ') != std::string::npos;  // the command's own name is printed anyway
    throw UsageError((subcommand ? app.get_name() + ": " : "") + error.what());
  }
  return std::nullopt;
}

}  // namespace deeptide::launch
