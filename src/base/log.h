// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages to the user: rank 0 writes them, warnings carry their rank.
#pragma once

#include <string>

namespace deeptide {

enum class LogLevel { debug, info, warning, error };

/// Writes "[deeptide] text" to standard error. Quiet below DEEPTIDE_LOG_LEVEL (debug|info|warning|error; default info).
void log(LogLevel level, const std::string& text);

}  // namespace deeptide
