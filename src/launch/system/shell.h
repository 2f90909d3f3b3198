// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Words and lines of a POSIX shell, quoted so that every shell restores them exactly.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

/// `word` itself if no shell would touch it, else in single quotes.
std::string shell_quote(const std::string& word);

/// The words quoted and joined by spaces.
std::string shell_join(const std::vector<std::string>& words);

/// The words of `text` as a shell cuts it: quotes and backslashes, but no variables, patterns or comments.
/// `option` is named in errors. Errors: UsageError if a quote is not closed.
std::vector<std::string> shell_split(const std::string& text, const std::string& option);

}  // namespace deeptide::launch
