// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the network interface for transports that would otherwise use the address of this machine's name.
#pragma once

#include <string>

namespace deeptide::launch {

/// True if this machine's own name resolves to a loopback address or not at all, so that peers cannot connect to it.
bool own_name_is_local();

/// Returns the interface that connections to `address` leave from; empty if it cannot be determined.
std::string interface_towards(const std::string& address);

}  // namespace deeptide::launch
