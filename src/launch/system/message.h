// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages between the launcher's processes as bytes. Each message declares both directions beside its struct.
#pragma once

#include <string>

namespace deeptide::launch {

/// The message as bytes (MessagePack); defined for each message in the .cc file of its struct.
template <typename Message>
std::string encode(const Message& message);

/// The message from its bytes. Errors: std::exception if a part is missing or has another type.
template <typename Message>
Message decode(const std::string& bytes);

}  // namespace deeptide::launch
