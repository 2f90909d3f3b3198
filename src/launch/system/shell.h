// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts between words and lines of a POSIX shell, quoted so that every shell restores the words exactly.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

/// Returns `word` unchanged if no shell would alter it, else in single quotes.
std::string shell_quote(const std::string& word);

/// Returns the words quoted and joined by spaces.
std::string shell_join(const std::vector<std::string>& words);

/// Splits `text` as a shell does, with quotes and backslashes but without variables, patterns or comments.
/// Errors: UsageError naming `option` if a quote is not closed.
std::vector<std::string> shell_split(const std::string& text, const std::string& option);

}  // namespace deeptide::launch
