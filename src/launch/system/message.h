// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Declares the encoding of messages between the launcher's processes; each struct's header declares both directions.
#pragma once

#include <string>

namespace deeptide::launch {

/// Returns the message as bytes (MessagePack). Each message defines it in the .cc file of its struct.
template <typename Message>
std::string encode(const Message& message);

/// Returns the message from its bytes. Errors: std::exception if a field is missing or has another type.
template <typename Message>
Message decode(const std::string& bytes);

}  // namespace deeptide::launch
