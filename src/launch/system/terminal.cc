// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The width of the terminal, and text that keeps to it.
#include "launch/system/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace deeptide::launch {

TerminalSize terminal_size() {
  if (::isatty(STDOUT_FILENO) == 0) return {};
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) return {24, 80};
  return {size.ws_row, size.ws_col};
}

std::string wrapped(const std::string& text, size_t width, size_t indent, size_t column) {
  std::istringstream words(text);
  std::string lines, word;
  bool is_first = true;  // of its line
  while (words >> word) {
    if (!is_first && column + 1 + word.size() > width) {
      lines += "\n" + std::string(indent, ' ');
      column = indent;
      is_first = true;
    }
    if (!is_first) lines += ' ';
    lines += word;
    column += word.size() + (is_first ? 0 : 1);
    is_first = false;
  }
  return lines;
}

std::string aligned(const std::vector<std::vector<std::string>>& rows, size_t width) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line += std::string(widths[i] - row[i].size() + 2, ' ');
    }
    if (width > 0 && line.size() > width) line.resize(width);
    text += line + "\n";
  }
  return text;
}

}  // namespace deeptide::launch
