// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks a parsed text against the table: names, types, ranges and statuses at every depth.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/check/values.h"

namespace deeptide::config {

/// Collects every problem of a text and reports them together, in the order of their lines.
class Problems {
 public:
  explicit Problems(std::string origin) : origin_(std::move(origin)) {}
  /// "origin:line: path: what"
  void add(int line, const std::string& path, const std::string& what);
  bool empty() const { return found_.empty(); }
  /// Errors: ConfigError with all problems, if there are any.
  void raise() const;

 private:
  std::string origin_;
  std::vector<std::pair<int, std::string>> found_;
};

/// Checks every key at every depth. `root` must outlive the values. Each "auto" adds a line to `decisions`.
Values validate(const JsonValue& root, Problems& problems, std::vector<std::string>& decisions);

}  // namespace deeptide::config
