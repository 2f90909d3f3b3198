// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The network interface for transports that would otherwise trust this machine's name.
#pragma once

#include <string>

namespace deeptide::launch {

/// True if this machine's own name resolves to a loopback address or not at all: peers cannot connect to that.
bool own_name_is_local();

/// The interface whose address connections to `address` come from; empty if it cannot be determined.
std::string interface_towards(const std::string& address);

}  // namespace deeptide::launch
