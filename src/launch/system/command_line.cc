// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lays out the pages of --help, and turns CLI11's outcomes into exit codes and UsageErrors.
#include "launch/system/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "launch/system/terminal.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {

namespace {

constexpr size_t kWidth = 80;
constexpr size_t kDescriptions = 30;  // the column in which they begin

/// Pages of --help in 80 columns. CLI11's own have longer lines and name its internals.
class HelpPage : public CLI::Formatter {
 public:
  explicit HelpPage(std::string usage = "") : usage_(std::move(usage)) {}

  std::string make_usage(const CLI::App* app, std::string name) const override {
    return usage_.empty() ? CLI::Formatter::make_usage(app, std::move(name)) : "Usage: " + usage_ + "\n";
  }

  std::string make_description(const CLI::App* app) const override {
    return wrapped(app->get_description(), kWidth, 0, 0) + "\n";
  }

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    return text;
  }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string type = option->get_type_size() == 0 ? "" : option->get_type_name();
    const std::string value = type.substr(0, type.find(':'));  // what follows describes a check
    std::string left = "  " + (is_positional ? option->get_name(true) : names(*option));
    if (!is_positional && !value.empty()) left += " " + value;
    std::string text = option->get_description();
    if (!option->get_default_str().empty()) text += " (default: " + short_number(option->get_default_str()) + ")";
    left += left.size() + 2 > kDescriptions ? "\n" + std::string(kDescriptions, ' ')
                                            : std::string(kDescriptions - left.size(), ' ');
    return left + wrapped(text, kWidth, kDescriptions, kDescriptions) + "\n";
  }

 private:
  static std::string names(const CLI::Option& option) {
    std::string text;
    for (const std::string& letter : option.get_snames()) text += (text.empty() ? "-" : ", -") + letter;
    for (const std::string& word : option.get_lnames()) text += (text.empty() ? "--" : ", --") + word;
    return text;
  }

  /// A number of CLI11 has six decimals: 30.000000.
  static std::string short_number(const std::string& text) {
    if (text.find('.') == std::string::npos) return text;
    const size_t last = text.find_last_not_of('0');
    return text.substr(0, text[last] == '.' ? last : last + 1);
  }

  std::string usage_;
};

}  // namespace

void set_usage(CLI::App& app, const std::string& line) { app.formatter(std::make_shared<HelpPage>(line)); }

std::optional<int> parse_arguments(CLI::App& app, std::vector<std::string> arguments) {
  if (!std::dynamic_pointer_cast<HelpPage>(app.get_formatter())) app.formatter(std::make_shared<HelpPage>());
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
