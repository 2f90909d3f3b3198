// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// nlohmann::json, whose parser and writer are compiled once: they are a twentieth of the compile time in each file.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace deeptide {

/// Reads strict JSON: nlohmann::json or ordered_json. Errors: nlohmann::json::parse_error.
template <typename Json = nlohmann::json>
Json read_json(const std::string& text);

/// The same without errors: a value for which is_discarded() holds where the text is malformed.
/// `comments`: // and /* */ are passed over.
template <typename Json = nlohmann::json>
Json try_read_json(const std::string& text, bool comments = false);

/// Writes JSON, compact where `indent` is negative. Errors: nlohmann::json::type_error where text is no UTF-8, if
/// strict.
template <typename Json>
std::string write_json(const Json& value, int indent = -1,
                       nlohmann::detail::error_handler_t invalid = nlohmann::detail::error_handler_t::strict);

extern template nlohmann::json read_json(const std::string& text);
extern template nlohmann::ordered_json read_json(const std::string& text);
extern template nlohmann::json try_read_json(const std::string& text, bool comments);
extern template nlohmann::ordered_json try_read_json(const std::string& text, bool comments);
extern template std::string write_json(const nlohmann::json& value, int indent,
                                       nlohmann::detail::error_handler_t invalid);
extern template std::string write_json(const nlohmann::ordered_json& value, int indent,
                                       nlohmann::detail::error_handler_t invalid);

}  // namespace deeptide
