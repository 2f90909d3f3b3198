// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns relaxed JSON into strict JSON: comments and trailing commas become blanks, so every offset stays.
#pragma once

#include <string>
#include <string_view>

namespace deeptide {

/// Blanks `#`, `//` and `/* */` comments and the commas before a closing bracket; keeps newlines and strings. On a
/// comment that never ends, `*unclosed` is its offset (std::string::npos otherwise).
std::string blank_comments(std::string_view text, size_t* unclosed);

}  // namespace deeptide
