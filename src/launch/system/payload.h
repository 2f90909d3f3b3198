// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values as the bytes of a frame: MessagePack, whose strings may hold any bytes, as arguments and variables do.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace deeptide::launch {

template <typename Value>
std::string pack(const Value& value) {
  std::string bytes;
  nlohmann::json::to_msgpack(nlohmann::json(value), bytes);
  return bytes;
}

/// Errors: nlohmann::json::exception if a part is missing or of another type.
template <typename Value>
Value unpack(const std::string& bytes) {
  return nlohmann::json::from_msgpack(bytes).get<Value>();
}

}  // namespace deeptide::launch
