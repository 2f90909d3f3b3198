// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The value of each key of the table in one text: as given, derived or by default.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/json.h"
#include "config/table/schema.h"

namespace deeptide::config {

/// One key in one text. `value` points into the parsed text; null when the key is absent, null or "auto".
struct Entry {
  const Key* key = nullptr;
  const JsonValue* value = nullptr;
  int line = 0;       // of the key, or of its section when the key is absent
  std::string shown;  // the path as the user spelt it
  bool automatic = false;
};

/// Entries by their path in the table ("zero_optimization.stage"). Errors: std::out_of_range (a defect of the caller)
/// for a path that the table lacks.
class Values {
 public:
  void record(const std::string& path, Entry entry) { entries_[path] = std::move(entry); }

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const Entry& at(const std::string& path) const { return entries_.at(path); }
  bool has(const std::string& path) const { return entries_.count(path) != 0; }
  bool given(const std::string& path) const { return at(path).value != nullptr; }

  bool flag(const std::string& path) const { return value(path).boolean; }
  int64_t integer(const std::string& path) const { return as_integer(value(path)); }
  double number(const std::string& path) const { return value(path).number; }
  /// The word, or a choice in the table's spelling; empty when absent.
  std::string word(const std::string& path) const;
  /// Does as `word`, but returns the first of several spellings of one choice; empty when absent.
  std::string usual_word(const std::string& path) const;
  std::optional<int64_t> maybe_integer(const std::string& path) const;

  /// The value as given; otherwise that of the key from which it derives, or the table's default.
  const JsonValue& value(const std::string& path) const;

 private:
  std::map<std::string, Entry> entries_;
};

}  // namespace deeptide::config
