// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Running a small program and reading what it says.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

struct ChildOutput {
  int code = -1;      // its exit code; 127: it could not be started; 128 + signal
  std::string text;   // standard output and errors together
  bool late = false;  // it was killed at the timeout
};

/// Waits for its end, at most `timeout_s`; then it is killed. `command`: the program, searched in PATH, and arguments.
ChildOutput run_child(const std::vector<std::string>& command, double timeout_s);

}  // namespace deeptide::launch
