// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The one file that compiles std::regex.
#include "base/libraries/pattern.h"

#include <regex>

namespace deeptide {
namespace {

#ifdef __GLIBCXX__
constexpr auto kSyntax = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;  // never exponential
#else
constexpr auto kSyntax = std::regex_constants::ECMAScript;
#endif

}  // namespace

struct Pattern::Regex {
  std::regex compiled;
};

Pattern::Pattern(const std::string& text) try : regex_(std::make_shared<Regex>(Regex{std::regex(text, kSyntax)})) {
} catch (const std::regex_error& error) {
  throw PatternError(error.what());
}

bool Pattern::search(const std::string& name, bool at_start) const {
  try {
    return std::regex_search(name, regex_->compiled,
                             at_start ? std::regex_constants::match_continuous : std::regex_constants::match_default);
  } catch (const std::regex_error& error) {
    throw PatternError(error.what());
  }
}

}  // namespace deeptide
