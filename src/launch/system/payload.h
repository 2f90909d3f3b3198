// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Encodes values as MessagePack, whose strings may hold any bytes, as arguments and variables do.
#pragma once

#include <string>

#include "base/libraries/nlohmann.h"

namespace deeptide::launch {

template <typename Value>
std::string pack(const Value& value) {
  std::string bytes;
  nlohmann::json::to_msgpack(nlohmann::json(value), bytes);
  return bytes;
}

/// Errors: nlohmann::json::exception if a field is missing or has another type.
template <typename Value>
Value unpack(const std::string& bytes) {
  return nlohmann::json::from_msgpack(bytes).get<Value>();
}

}  // namespace deeptide::launch
