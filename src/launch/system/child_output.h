// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a small program and captures its output.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::launch {

struct ChildOutput {
  int code = -1;      // exit code; 127: could not be started; 128 + signal: killed
  std::string text;   // standard output, and standard error if captured
  bool late = false;  // killed at the timeout
};

/// Destination of the child's standard error: the result, or this process's own standard error.
enum class ChildErrors : uint8_t { captured, inherited };

/// Runs a program, and kills it after `timeout_s`. `command`: the program, searched in PATH, and its arguments.
ChildOutput run_child(const std::vector<std::string>& command, double timeout_s,
                      ChildErrors errors = ChildErrors::captured);

}  // namespace deeptide::launch
