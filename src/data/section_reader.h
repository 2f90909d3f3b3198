// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads numbers and words of a section, naming what is missing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "deeptide/errors.h"

namespace deeptide::data {

/// A section and its name in errors. Every reader throws ConfigError for a key that is missing or of another kind.
class SectionReader {
 public:
  SectionReader(const JsonValue& section, std::string name) : section_(section), name_(std::move(name)) {}

  bool has(std::string_view key) const;
  int64_t integer(std::string_view key) const;
  std::string word(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key) const;
  SectionReader below(std::string_view key) const;
  const JsonValue& value() const { return section_; }
  [[noreturn]] void fail(std::string_view key, const std::string& what) const;

 private:
  const JsonValue& find(std::string_view key, const char* expected) const;

  const JsonValue& section_;  // outlived by the text that it is part of
  std::string name_;
};

}  // namespace deeptide::data
