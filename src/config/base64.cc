// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Base64 in the URL-safe alphabet, in which DeepSpeed's tools pass a configuration on a command line.
#include "config/base64.h"

#include <cstdint>

namespace deeptide::config {

std::optional<std::string> decode_base64_url(std::string_view text) {
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
  for (int padding = 0; padding < 2 && !text.empty() && text.back() == '='; ++padding) text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int held = 0;
  for (char c : text) {
    const size_t digit = kAlphabet.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = (bits << 6 | static_cast<uint32_t>(digit)) & 0xffff;
    held += 6;
    if (held >= 8) {
      held -= 8;
      bytes += static_cast<char>(bits >> held & 0xff);
    }
  }
  return bytes;
}

}  // namespace deeptide::config
