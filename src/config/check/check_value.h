// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks one value against its key: type, range, choices, status.
#pragma once

#include <string>

#include "base/json.h"
#include "config/table/schema.h"

namespace deeptide::config {

/// Returns "expected …, got …", or an empty string when the value has the key's type and range.
std::string type_problem(const Key& key, const JsonValue& value);

/// Returns "… is not supported yet …", or an empty string when the value can be had, is harmless or asks for nothing.
std::string status_problem(const Key& key, const JsonValue& value);

/// Whether `value` asks for nothing: the default, or another value that means 'off'.
bool is_off(const Key& key, const JsonValue& value);

/// The problem with `value` of a key or section that is not supported; `cure` says what to write instead.
std::string not_yet_text(const std::string& reason, const std::string& value, const std::string& cure);

/// The value as JSON, cut when long.
std::string shown_value(const JsonValue& value);

}  // namespace deeptide::config
