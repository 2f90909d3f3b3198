// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whether one value suits its key: type, range, choices, status.
#pragma once

#include <string>

#include "base/json.h"
#include "config/table/schema.h"

namespace deeptide::config {

/// Empty when the value has the key's type and range; otherwise "expected …, got …".
std::string type_problem(const Key& key, const JsonValue& value);

/// Empty when the value is honoured or asks for nothing; otherwise "… is not supported yet …" or "… has no effect here
/// …".
std::string status_problem(const Key& key, const JsonValue& value);

/// The text about `value`, which a key or section of this status cannot take; `cure`: what to write instead.
std::string status_text(Status status, const std::string& reason, const std::string& value, const std::string& cure);

/// The value as JSON, shortened when long.
std::string shown_value(const JsonValue& value);

}  // namespace deeptide::config
