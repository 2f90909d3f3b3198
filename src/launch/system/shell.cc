// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Quotes words for a POSIX shell and splits lines as it does.
#include "launch/system/shell.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

bool is_plain(const std::string& word) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("_-./=:,+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

}  // namespace

std::string shell_quote(const std::string& word) {
  if (is_plain(word)) return word;
  std::string quoted = "'";
  for (char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string shell_join(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_quote(word);
  return line;
}

std::vector<std::string> shell_split(const std::string& text, const std::string& option) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool space = c == ' ' || c == '\t' || c == '\n';
    if (!quote && space) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    // Within double quotes a backslash is literal unless one of these characters follows.
    const bool hides = quote == 0 || (quote == '"' && i + 1 < text.size() &&
                                      std::string_view("\"\\$`").find(text[i + 1]) != std::string_view::npos);
    if (c == '\\' && hides && i + 1 < text.size()) {
      words.back() += text[++i];
    } else if (quote ? c == quote : (c == '\'' || c == '"')) {
      quote = quote ? 0 : c;
    } else {
      words.back() += c;
    }
  }
  if (quote) throw UsageError(option + ": unclosed quote (" + std::string(1, quote) + ") in: " + text);
  return words;
}

}  // namespace deeptide::launch
