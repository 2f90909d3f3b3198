// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds a parsed text against the table: names, types, ranges and statuses at every depth.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/check/values.h"

namespace deeptide::config {

/// Everything that is wrong with a text, told at once and in the order of its lines.
class Problems {
 public:
  explicit Problems(std::string origin) : origin_(std::move(origin)) {}
  /// "origin:line: path: what"
  void add(int line, const std::string& path, const std::string& what);
  bool empty() const { return found_.empty(); }
  /// Errors: ConfigError with all of them, when there are any.
  void raise() const;

 private:
  std::string origin_;
  std::vector<std::pair<int, std::string>> found_;
};

/// `root` must outlive the values. Each "auto" adds a line to `decisions`.
Values validate(const JsonValue& root, Problems& problems, std::vector<std::string>& decisions);

}  // namespace deeptide::config
