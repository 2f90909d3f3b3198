// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Formats text by fmt, whose code is compiled once: fmt::format in each file costs a tenth of the compile time.
#pragma once

#include <fmt/base.h>

#include <string>

namespace deeptide {

/// Writes values in place of the braces in `pattern`, which need not be a constant.
/// Errors: fmt::format_error where they do not fit it.
std::string format_erased(fmt::string_view pattern, fmt::format_args values);

/// Writes values in place of the braces in `pattern`, which the compiler checks.
template <typename... Values>
std::string format_text(fmt::format_string<Values...> pattern, Values&&... values) {
  return format_erased(pattern, fmt::make_format_args(values...));
}

/// Joins words, or numbers, with a separator between them.
template <typename Range>
std::string join_text(const Range& range, fmt::string_view separator) {
  std::string joined;
  for (const auto& value : range) {
    if (!joined.empty()) joined.append(separator.data(), separator.size());
    joined += format_text("{}", value);
  }
  return joined;
}

}  // namespace deeptide
