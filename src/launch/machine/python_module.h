// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Commands that need torch run in the interpreter that a job would use.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

/// Replaces this process by `python -m <module> <arguments…>`; `python`: empty for the one that is active or in PATH.
/// Errors: runtime_error when Python cannot be run.
[[noreturn]] void become_module(const std::string& module, const std::vector<std::string>& arguments,
                                const std::string& python = "");

}  // namespace deeptide::launch
