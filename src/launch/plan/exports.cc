// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collects variables by prefix from the environment and by name from the user's files.
#include "launch/plan/exports.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr std::array<std::string_view, 11> kPrefixes = {"NCCL",  "RCCL",      "PYTHON", "MV2",       "UCX",   "MLFLOW",
                                                        "GLOO_", "TP_SOCKET", "OMP_",   "DEEPTIDE_", "TORCH_"};
// Variables of one job. A job that is started inside another one must not inherit them.
constexpr std::array<std::string_view, 4> kNever = {"DEEPTIDE_JOB_TOKEN", "DEEPTIDE_RESTART_COUNT", "DEEPTIDE_LAUNCHER",
                                                    "DEEPTIDE_HUB"};
constexpr std::array<std::string_view, 7> kSecretWords = {"TOKEN",      "PASS", "PWD", "SECRET",
                                                          "CREDENTIAL", "KEY",  "AUTH"};

bool is_name(std::string_view name) {
  return !name.empty() && !std::isdigit(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

std::string unquoted(const std::string& value) {
  const bool quoted = value.size() >= 2 && (value[0] == '"' || value[0] == '\'') && value.back() == value[0];
  return quoted ? value.substr(1, value.size() - 2) : value;
}

void add_file(Environment& environment, const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream || std::filesystem::is_directory(path)) return;
  std::ostringstream text;
  text << stream.rdbuf();
  for (auto& [name, value] : parse_env_file(text.str(), path.string())) environment[name] = value;
}

}  // namespace

bool is_exported(std::string_view name) {
  const auto starts = [&](std::string_view prefix) { return name.compare(0, prefix.size(), prefix) == 0; };
  return is_name(name) && std::any_of(kPrefixes.begin(), kPrefixes.end(), starts) &&
         std::find(kNever.begin(), kNever.end(), name) == kNever.end();
}

bool is_secret(std::string_view name) {
  std::string upper(name);
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  return std::any_of(kSecretWords.begin(), kSecretWords.end(),
                     [&](std::string_view word) { return upper.find(word) != std::string::npos; });
}

Environment parse_env_file(std::string_view text, const std::string& source) {
  Environment environment;
  std::istringstream stream{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const size_t first = line.find_first_not_of(" \t");
    if (first == std::string::npos || line[first] == '#') continue;
    line.erase(0, first);
    if (line.compare(0, 7, "export ") == 0) line.erase(0, std::min(line.size(), line.find_first_not_of(" \t", 7)));
    const size_t equals = line.find('=');
    if (equals == std::string::npos || !is_name(std::string_view(line).substr(0, equals))) {
      // Does not quote the line: it may hold a secret.
      throw UsageError(source + ":" + std::to_string(number) + ": expected NAME=VALUE");
    }
    if (line.find('\0') != std::string::npos) {
      throw UsageError(source + ":" + std::to_string(number) + ": a variable cannot contain a zero byte");
    }
    environment[line.substr(0, equals)] = unquoted(line.substr(equals + 1));
  }
  return environment;
}

Environment exported_environment(const char* const* environment, const std::vector<std::string>& folders) {
  Environment exported;
  std::string file = ".deepspeed_env";
  for (const char* const* entry = environment; *entry; ++entry) {
    const std::string_view line = *entry;
    const std::string name(line.substr(0, line.find('=')));
    const std::string value(line.substr(std::min(line.size(), name.size() + 1)));
    if (is_exported(name)) exported[name] = value;
    if (name == "DS_ENV_FILE" && !value.empty()) file = value;
  }
  for (const std::string& folder : folders) {
    for (const std::string& name : {file, std::string(".deeptide_env")}) {
      add_file(exported, std::filesystem::path(folder) / name);  // an absolute name replaces the folder
    }
  }
  return exported;
}

Environment exported_environment() {
  const char* home = std::getenv("HOME");
  std::vector<std::string> folders;
  if (home && *home) folders.push_back(home);
  folders.push_back(".");
  return exported_environment(environ, folders);
}

}  // namespace deeptide::launch
