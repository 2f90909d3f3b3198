// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The Python and native stacks of a running rank, or what the kernel knows of one that cannot answer.
#pragma once

#include <sys/types.h>

#include <string>

#include "launch/process/flight_files.h"

namespace deeptide::launch {

/// Asks process `pid`, which inherited `files`, for its stacks; at most about two seconds. A process that is stopped,
/// or has not loaded Deeptide, cannot answer: then the result is what /proc reports of its threads.
std::string collect_stacks(pid_t pid, const FlightFiles& files);

/// A line of backtrace_symbols_fd with the C++ name readable: "libx.so(_ZN1aC1Ev+0x12) [0x7f]" -> "a::a() in libx.so".
std::string readable_frame(const std::string& line);

}  // namespace deeptide::launch
