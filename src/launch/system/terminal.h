// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The width of the terminal, and text that keeps to it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace deeptide::launch {

/// Size of standard output's terminal; zeros if it is none.
struct TerminalSize {
  size_t rows = 0, columns = 0;
};
TerminalSize terminal_size();

/// Breaks `text` between words, so that no line passes `width`. The first line begins in `column`, each other one after
/// `indent` spaces. A word that is longer stays whole.
std::string wrapped(const std::string& text, size_t width, size_t indent, size_t column);

/// Rows of cells as lines whose columns are aligned, two spaces apart. No line passes `width`; 0: the last cells are
/// whole.
std::string aligned(const std::vector<std::vector<std::string>>& rows, size_t width);

}  // namespace deeptide::launch
