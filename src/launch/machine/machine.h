// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds this machine's resources for a job: devices, cores, addresses, a Python interpreter.
#pragma once

#include <string>
#include <vector>

namespace deeptide::launch {

/// Counts the devices that a process would see here: the `nvidiaN` nodes in `device_dir`, limited by `visible`, the
/// value of CUDA_VISIBLE_DEVICES (null: not set).
int count_devices(const std::string& device_dir, const char* visible);

/// Returns the cores that this process may run on.
std::vector<int> usable_cores();

/// Returns this machine's addresses as `hostname -I` lists them: no loopback, no link-local addresses, IPv4 first.
std::vector<std::string> own_addresses();

/// True if `name` is localhost, this machine's name, or resolves to one of its addresses.
bool is_this_machine(const std::string& name);

/// Returns the interpreter for scripts: $VIRTUAL_ENV's, that of the environment this binary is installed in, or PATH's.
/// Errors: UsageError if there is none.
std::string find_python();

/// Returns `name` if it contains a slash, else its first executable match in PATH; empty if there is none.
std::string find_program(const std::string& name);

}  // namespace deeptide::launch
