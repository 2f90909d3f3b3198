// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The part of JSON Schema that the published schema uses, enough to hold it against Config.
#include "config/publish/schema_check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <stdexcept>

namespace deeptide {
namespace {

using nlohmann::json;

bool has_type(const json& type, const json& value) {
  if (type.is_array()) {
    return std::any_of(type.begin(), type.end(), [&](const json& one) { return has_type(one, value); });
  }
  if (type == "integer") {
    return value.is_number_integer() || (value.is_number() && value.get<double>() == std::floor(value.get<double>()));
  }
  if (type == "number") return value.is_number();
  return type == value.type_name();
}

/// Compiling a pattern takes longer than all else here.
const std::regex& compiled(const std::string& pattern) {
  static std::map<std::string, std::regex> known;
  const auto found = known.find(pattern);
  return found != known.end() ? found->second : known.emplace(pattern, std::regex(pattern)).first->second;
}

/// Patterns accept whatever they match, in this schema.
bool matches_a_pattern(const json& schema, const std::string& name, const json& member) {
  if (!schema.contains("patternProperties")) return false;
  for (const auto& [pattern, rule] : schema["patternProperties"].items()) {
    if (std::regex_search(name, compiled(pattern)) && satisfies(rule, member)) return true;
  }
  return false;
}

bool members_satisfy(const json& schema, const json& value) {
  if (!value.is_object()) return true;
  const auto properties = schema.find("properties");
  for (const auto& [name, member] : value.items()) {
    if (properties != schema.end() && properties->contains(name)) {
      if (!satisfies((*properties)[name], member)) return false;
    } else if (matches_a_pattern(schema, name, member)) {
      continue;
    } else if (schema.contains("additionalProperties") && !satisfies(schema["additionalProperties"], member)) {
      return false;
    }
  }
  return true;
}

bool one_keyword(const std::string& word, const json& rule, const json& schema, const json& value) {
  const auto all = [&](const json& one) { return satisfies(one, value); };
  if (word == "type") return has_type(rule, value);
  if (word == "enum") return std::find(rule.begin(), rule.end(), value) != rule.end();
  if (word == "const") return rule == value;
  if (word == "anyOf") return std::any_of(rule.begin(), rule.end(), all);
  if (word == "allOf") return std::all_of(rule.begin(), rule.end(), all);
  if (word == "not") return !all(rule);
  if (word == "if") return !all(rule) || all(schema["then"]);
  if (word == "properties" || word == "additionalProperties") return members_satisfy(schema, value);
  if (word == "required") {
    return !value.is_object() || std::all_of(rule.begin(), rule.end(),
                                             [&](const json& name) { return value.contains(name.get<std::string>()); });
  }
  if (word == "items") {
    return !value.is_array() ||
           std::all_of(value.begin(), value.end(), [&](const json& item) { return satisfies(rule, item); });
  }
  if (word == "minItems") return !value.is_array() || value.size() >= rule.get<size_t>();
  if (word == "maxItems") return !value.is_array() || value.size() <= rule.get<size_t>();
  if (word == "pattern") {
    return !value.is_string() || std::regex_search(value.get<std::string>(), compiled(rule.get<std::string>()));
  }
  if (word == "minimum") return !value.is_number() || value >= rule;
  if (word == "maximum") return !value.is_number() || value <= rule;
  if (word == "exclusiveMinimum") return !value.is_number() || value > rule;
  if (word == "exclusiveMaximum") return !value.is_number() || value < rule;
  const char* const told_only[] = {"then", "description", "default", "title", "$schema", "patternProperties"};
  if (std::find(std::begin(told_only), std::end(told_only), word) != std::end(told_only)) return true;
  throw std::invalid_argument("unknown keyword " + word);
}

}  // namespace

bool satisfies(const json& schema, const json& value) {
  if (schema.is_boolean()) return schema.get<bool>();
  for (const auto& [word, rule] : schema.items()) {
    if (!one_keyword(word, rule, schema, value)) return false;
  }
  return true;
}

}  // namespace deeptide
