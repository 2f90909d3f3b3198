// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collects the Python and native stacks of a running rank, or the kernel's facts about one that cannot answer.
#pragma once

#include <sys/types.h>

#include <string>

#include "launch/process/flight_files.h"

namespace deeptide::launch {

/// Asks process `pid`, which inherited `files`, for its stacks; takes at most about two seconds. A process that is
/// stopped or has not loaded Deeptide cannot answer; the result then holds the facts that /proc reports about its
/// threads.
std::string collect_stacks(pid_t pid, const FlightFiles& files);

/// Demangles a line of backtrace_symbols_fd: "libx.so(_ZN1aC1Ev+0x12) [0x7f]" -> "a::a() in libx.so".
std::string readable_frame(const std::string& line);

}  // namespace deeptide::launch
