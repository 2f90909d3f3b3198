// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which of this machine's variables go to other hosts: those with certain prefixes, and those in the user's files.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace deeptide::launch {

using Environment = std::map<std::string, std::string>;

/// True for the variables that are exported by their name's prefix: settings of Python, NCCL and transports.
bool is_exported(std::string_view name);

/// True if the name says that the value is a secret: it is exported, but never printed.
bool is_secret(std::string_view name);

/// Lines NAME=VALUE, `#` comments and empty lines; a value is taken literally, except for quotes around all of it.
/// Errors: UsageError with `source` and the line's number.
Environment parse_env_file(std::string_view text, const std::string& source);

/// The exported variables of `environment` (as environ), then what the files .deepspeed_env (or $DS_ENV_FILE) and
/// .deeptide_env in `folders` add, in this order; later ones win.
Environment exported_environment(const char* const* environment, const std::vector<std::string>& folders);

/// The same for this process: environ, the home folder, then the working folder.
Environment exported_environment();

}  // namespace deeptide::launch
