// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a small program and captures its output.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::launch {

struct ChildOutput {
  int code = -1;      // its exit code; 127: it could not be started; 128 + signal
  std::string text;   // standard output, and errors where they are captured
  bool late = false;  // killed at the timeout
};

/// Where the child's standard error goes: into the result, or where this process's own goes.
enum class ChildErrors : uint8_t { captured, inherited };

/// Runs the program to its end and kills it after `timeout_s`. `command`: the program, searched in PATH, and arguments.
ChildOutput run_child(const std::vector<std::string>& command, double timeout_s,
                      ChildErrors errors = ChildErrors::captured);

}  // namespace deeptide::launch
