// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The part of JSON Schema that the published schema uses, enough to hold it against Config.
#pragma once

#include <nlohmann/json.hpp>

namespace deeptide {

/// Whether `value` satisfies `schema`. Errors: std::invalid_argument on a keyword that it does not know.
bool satisfies(const nlohmann::json& schema, const nlohmann::json& value);

}  // namespace deeptide
