// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns an exception of a launcher process into one line on standard error and an exit code.
#pragma once

#include <functional>

namespace deeptide::launch {

/// Exit codes of the command itself. A failed job returns the exit code of the rank.
inline constexpr int kExitUsage = 2;          // UsageError
inline constexpr int kExitCannotStart = 126;  // any other exception

/// Returns the exit code of `work`. Prints the text of an exception to standard error and returns its code above.
int run_reporting(const std::function<int()>& work);

}  // namespace deeptide::launch
