// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compiles nlohmann::json's parser and writer.
#include "base/libraries/nlohmann.h"

namespace deeptide {

template <typename Json>
Json read_json(const std::string& text) {
  return Json::parse(text);
}

template <typename Json>
Json try_read_json(const std::string& text, bool comments) {
  return Json::parse(text, nullptr, /*allow_exceptions=*/false, comments);
}

template <typename Json>
std::string write_json(const Json& value, int indent, nlohmann::detail::error_handler_t invalid) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, invalid);
}

template nlohmann::json read_json(const std::string& text);
template nlohmann::ordered_json read_json(const std::string& text);
template nlohmann::json try_read_json(const std::string& text, bool comments);
template nlohmann::ordered_json try_read_json(const std::string& text, bool comments);
template std::string write_json(const nlohmann::json& value, int indent, nlohmann::detail::error_handler_t invalid);
template std::string write_json(const nlohmann::ordered_json& value, int indent,
                                nlohmann::detail::error_handler_t invalid);

}  // namespace deeptide
