// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What this machine offers to a job: devices, cores, ports, a Python interpreter.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

/// Devices that a process here would see: the `nvidiaN` nodes in `device_dir`, limited by `visible`, the value of
/// CUDA_VISIBLE_DEVICES (null: not set).
int count_devices(const std::string& device_dir, const char* visible);

/// The cores that this process may run on.
std::vector<int> usable_cores();

/// Returns `wanted` if nothing listens there, or a free port when it is 0.
/// Errors: UsageError naming the port when it is in use.
int choose_port(int wanted);

/// The interpreter for scripts: $VIRTUAL_ENV's, that of the environment this binary is installed in, or PATH's.
/// Errors: UsageError if there is none.
std::string find_python();

/// `name` itself when it holds a slash, else its first executable match in PATH; empty if there is none.
std::string find_program(const std::string& name);

}  // namespace deeptide::launch
