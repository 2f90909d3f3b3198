// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks what only a fault in this library can break, and says so to whoever meets it.
#pragma once

#include <sstream>
#include <stdexcept>

namespace deeptide {

/// Errors: std::logic_error (RuntimeError in Python) with the place, `what` one after the other, and what to do.
template <typename... What>
[[noreturn]] void fail_invariant(const char* file, int line, const What&... what) {
  std::ostringstream text;
  text << "a fault in deeptide, at " << file << ":" << line << ": ";
  (text << ... << what);
  text << ". Please report it with this text and what the program did before; the engine cannot go on";
  throw std::logic_error(text.str());
}

}  // namespace deeptide

/// Not for users' mistakes, which have errors of their own.
#define DEEPTIDE_INVARIANT(condition, ...)                              \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::deeptide::fail_invariant(__FILE_NAME__, __LINE__, __VA_ARGS__); \
  } while (false)
