// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The value of each key of the table in one text: as given, derived or by default.
#include "config/check/values.h"

#include <algorithm>

namespace deeptide::config {

const JsonValue& Values::value(const std::string& path) const {
  const Entry& entry = at(path);
  const Key& key = *entry.key;
  if (entry.value) return *entry.value;
  if (entry.automatic && has(key.auto_path)) return value(key.auto_path);
  if (!key.sibling.empty()) return value(path.substr(0, path.rfind('.') + 1) + key.sibling);
  return key.fallback;
}

std::string Values::word(const std::string& path) const {
  const Key& key = *at(path).key;
  const std::string& written = value(path).string;
  const size_t choice = find_choice(key, written);
  return choice < key.choices.size() ? key.choices[choice] : written;
}

std::string Values::usual_word(const std::string& path) const {
  const Key& key = *at(path).key;
  const size_t choice = find_choice(key, value(path).string);
  if (choice >= key.enumerators.size()) return word(path);
  const auto first = std::find(key.enumerators.begin(), key.enumerators.end(), key.enumerators[choice]);
  return key.choices[static_cast<size_t>(first - key.enumerators.begin())];
}

std::optional<int64_t> Values::maybe_integer(const std::string& path) const {
  const JsonValue& found = value(path);
  if (found.is(JsonKind::null)) return std::nullopt;
  return as_integer(found);
}

}  // namespace deeptide::config
