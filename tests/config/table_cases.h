// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every key of the table as a test case: a text that holds this key, and values that suit it or do not.
#pragma once

#include <string>
#include <vector>

#include "config/table/schema.h"

namespace deeptide::config {

struct TableCase {
  const Key* key = nullptr;
  std::vector<const Key*> sections;  // around it, outermost first
  const Variant* variant = nullptr;  // of the innermost section

  /// "optimizer.params.lr", with "<name>" of a dictionary as "one".
  std::string path() const;
  /// A text with `name`: `value` on line 3 and, on request, every section around it switched on.
  std::string text(const std::string& name, const std::string& value, bool switched_on) const;
  std::string text(const std::string& value, bool switched_on = false) const;
};

std::vector<TableCase> all_leaves();
std::vector<TableCase> all_sections();

/// Whether some values are errors beside the other keys' defaults (config/check/rules.cc).
bool depends_on_another(const Key& key);
/// A value of the right type that is neither the default nor 'off'.
std::string other_value(const Key& key);
/// Values of the wrong type or out of range.
std::vector<std::string> wrong_values(const Key& key);

/// The text of the ConfigError, or an empty string when the text is a configuration.
std::string error_of(const std::string& text);

}  // namespace deeptide::config
