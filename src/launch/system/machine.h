// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// This machine's resources for a job: devices, cores, ports, addresses, a Python interpreter.
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
/// Errors: UsageError naming the port, and the process that holds it where that can be seen.
int choose_port(int wanted);

/// The first port from `first` on that is free; any free one if the next hundred are not.
int next_free_port(int first);

/// " (held by process 123, 'name')" for the listener at `port`, or nothing where that cannot be seen.
std::string port_holder(int port);

/// This machine's addresses as `hostname -I` lists them: no loopback, no link-local ones, IPv4 first.
std::vector<std::string> own_addresses();

/// True if `name` is localhost, this machine's name, or resolves to one of its addresses.
bool is_this_machine(const std::string& name);

/// The interpreter for scripts: $VIRTUAL_ENV's, that of the environment this binary is installed in, or PATH's.
/// Errors: UsageError if there is none.
std::string find_python();

/// `name` itself when it holds a slash, else its first executable match in PATH; empty if there is none.
std::string find_program(const std::string& name);

}  // namespace deeptide::launch
