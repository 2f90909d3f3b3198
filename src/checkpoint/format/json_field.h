// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// JSON whose failures are CheckpointErrors.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/libraries/nlohmann.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {

[[noreturn]] inline void malformed(const std::string& path, const std::string& why) {
  throw CheckpointError("malformed " + path + ": " + why + "; use another checkpoint");
}

/// Refuses fractions and values above int64, which the library's get<int64_t>() changes silently.
template <typename Json>
int64_t integer_of(const Json& value, const std::string& path) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.template get<uint64_t>() > kMax)) {
    malformed(path, std::string("expected an integer, got a ") + value.type_name());
  }
  return value.template get<int64_t>();
}

/// Errors: CheckpointError for text that is not UTF-8, which JSON cannot hold.
template <typename Json>
std::string dump_text(const Json& value, int indent = -1) {
  try {
    return write_json(value, indent);
  } catch (const typename Json::exception& error) {
    throw CheckpointError(std::string("cannot save a name or a state that is not UTF-8: ") + error.what());
  }
}

}  // namespace deeptide::checkpoint
