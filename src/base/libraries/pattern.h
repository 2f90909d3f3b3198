// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds regular expressions in names by std::regex, whose templates take seconds of each file that uses them.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace deeptide {

struct PatternError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A regular expression of ECMAScript without back references. It takes time by the product of both lengths, never
/// more.
class Pattern {
 public:
  /// Errors: PatternError, in the words of std::regex.
  explicit Pattern(const std::string& text);
  /// Whether a part of `name` matches. Errors: as above.
  bool is_in(const std::string& name) const { return search(name, /*at_start=*/false); }
  /// Whether `name` begins with a match.
  bool begins(const std::string& name) const { return search(name, /*at_start=*/true); }

 private:
  struct Regex;
  bool search(const std::string& name, bool at_start) const;

  std::shared_ptr<const Regex> regex_;
};

}  // namespace deeptide
