// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Selects the variables that are sent to other hosts: those with certain prefixes, and those in the user's files.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace deeptide::launch {

using Environment = std::map<std::string, std::string>;

/// True if the name's prefix marks a variable to export: settings of Python, NCCL and transports.
bool is_exported(std::string_view name);

/// True if the name marks the value as secret. Secret variables are exported but never printed.
bool is_secret(std::string_view name);

/// Parses lines NAME=VALUE, `#` comments and empty lines. Takes values literally, except for quotes around all of it.
/// Errors: UsageError with `source` and the line's number.
Environment parse_env_file(std::string_view text, const std::string& source);

/// Returns the exported variables of `environment` (in environ's form), then those of the files .deepspeed_env (or
/// $DS_ENV_FILE) and .deeptide_env in `folders`, in this order. Later values override earlier ones.
Environment exported_environment(const char* const* environment, const std::vector<std::string>& folders);

/// Does the same for this process: environ, the home folder, then the working folder.
Environment exported_environment();

}  // namespace deeptide::launch
