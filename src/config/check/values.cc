// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What a text says about each key of the table, defaults filled in.
#include "config/check/values.h"

namespace deeptide::config {

const JsonValue& Values::value(const std::string& path) const {
  const Entry& entry = at(path);
  return entry.value ? *entry.value : entry.key->fallback;
}

int64_t Values::as_integer(const JsonValue& value) {
  return value.is(JsonKind::number) ? static_cast<int64_t>(value.number) : value.integer;
}

std::string Values::word(const std::string& path) const {
  const Key& key = *at(path).key;
  const std::string& written = value(path).string;
  for (const std::string& choice : key.choices) {
    if (same_word(choice, written, key.any_case)) return choice;
  }
  return written;
}

std::optional<int64_t> Values::maybe_integer(const std::string& path) const {
  const JsonValue& found = value(path);
  if (found.is(JsonKind::null)) return std::nullopt;
  return as_integer(found);
}

}  // namespace deeptide::config
