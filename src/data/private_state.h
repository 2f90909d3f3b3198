// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Entries of ours in the state that checkpoints keep for programs, where Python's engine has its own.
#pragma once

#include <functional>
#include <string>

#include "base/libraries/nlohmann.h"

namespace deeptide::data {

using Json = nlohmann::ordered_json;

/// Returns the client state with the entry at `path`, such as "loader" or "less_work/tokens".
/// Errors: ConfigError if the state is no JSON object.
std::string add_private(const std::string& client_state_json, const std::string& path, Json entry);
/// Hands the entry to `take`; false if there is none. Errors: ConfigError if `take` finds it malformed.
bool take_private(const std::string& client_state_json, const std::string& path,
                  const std::function<void(const Json&)>& take);

}  // namespace deeptide::data
