// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The one file that compiles std::regex.
#include "base/libraries/pattern.h"

#include <array>
#include <locale>
#include <regex>

namespace deeptide {
namespace {

#ifdef __GLIBCXX__
constexpr auto kSyntax = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;  // never exponential
#else
constexpr auto kSyntax = std::regex_constants::ECMAScript;
#endif

/// libstdc++ fills a facet's tables of characters at their first use, without a lock, and patterns of ranks that are
/// threads read them side by side: the tables are filled here, under the lock of a static.
void fill_tables_of_characters() {
  static const bool filled = [] {
    const auto& characters = std::use_facet<std::ctype<char>>(std::locale());
    std::array<char, 2> text{'a', 'z'}, copy{};
    characters.widen(text.data(), text.data() + text.size(), copy.data());
    characters.narrow(text.data(), text.data() + text.size(), '\0', copy.data());
    return true;
  }();
  static_cast<void>(filled);
}

std::regex compile(const std::string& text) {
  fill_tables_of_characters();
  return std::regex(text, kSyntax);
}

}  // namespace

struct Pattern::Regex {
  std::regex compiled;
};

Pattern::Pattern(const std::string& text) try : regex_(std::make_shared<Regex>(Regex{compile(text)})) {
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
