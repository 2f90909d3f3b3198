// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What a text says about each key of the table, defaults filled in.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/json.h"
#include "config/table/schema.h"

namespace deeptide::config {

/// `value` points into the parsed text; null when the key is absent, null or "auto".
struct Entry {
  const Key* key = nullptr;
  const JsonValue* value = nullptr;
  int line = 0;       // of the key, or of the section that lacks it
  std::string shown;  // the path as the user spelt it
  bool automatic = false;
};

/// Entries by their path in the table ("zero_optimization.stage"). Reading a path that the table lacks is a bug:
/// std::out_of_range.
class Values {
 public:
  void record(const std::string& path, Entry entry) { entries_[path] = std::move(entry); }

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const Entry& at(const std::string& path) const { return entries_.at(path); }
  bool given(const std::string& path) const { return at(path).value != nullptr; }

  bool flag(const std::string& path) const { return value(path).boolean; }
  int64_t integer(const std::string& path) const { return as_integer(value(path)); }
  double number(const std::string& path) const { return value(path).number; }
  /// Empty when absent; a choice is spelt as in the table.
  std::string word(const std::string& path) const;
  std::optional<int64_t> maybe_integer(const std::string& path) const;

  /// The value, or the table's default.
  const JsonValue& value(const std::string& path) const;
  static int64_t as_integer(const JsonValue& value);

 private:
  std::map<std::string, Entry> entries_;
};

}  // namespace deeptide::config
