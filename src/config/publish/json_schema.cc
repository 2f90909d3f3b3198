// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// config_json_schema: the table as a JSON Schema, draft 2020-12.
#include <algorithm>
#include <cctype>

#include "base/libraries/nlohmann.h"
#include "config/publish/publish.h"
#include "deeptide/config.h"

namespace deeptide {
namespace {

using config::Key;
using config::Kind;
using config::Status;
using config::Variant;
using nlohmann::ordered_json;

/// How closely the keys of a section are checked, as in validate.cc.
enum class Check : uint8_t { all, types, names };

ordered_json as_json(const JsonValue& value) { return read_json<ordered_json>(to_text(value)); }

const char* type_name(Kind kind) {
  switch (kind) {
    case Kind::boolean:
      return "boolean";
    case Kind::integer:
      return "integer";
    case Kind::number:
      return "number";
    case Kind::list:
      return "array";
    case Kind::word:
      return "string";
    default:
      return "object";
  }
}

void add_range(const Key& key, ordered_json& rule) {
  const auto exact = [](double value) {
    const auto whole = static_cast<int64_t>(value);
    return value == static_cast<double>(whole) ? ordered_json(whole) : ordered_json(value);
  };
  if (key.lowest) rule[key.lowest_excluded ? "exclusiveMinimum" : "minimum"] = exact(*key.lowest);
  if (key.highest) rule[key.highest_excluded ? "exclusiveMaximum" : "maximum"] = exact(*key.highest);
}

// JSON Schema has no case-insensitive match, so each letter becomes a class of both cases.
std::string any_case_pattern(const std::vector<std::string>& names) {
  std::string pattern;
  for (const std::string& name : names) {
    pattern += pattern.empty() ? "^(" : "|";
    for (unsigned char c : name) {
      const bool letter = std::isalpha(c);
      const char both[] = {'[', static_cast<char>(std::toupper(c)), static_cast<char>(std::tolower(c)), ']', '\0'};
      pattern += letter ? std::string(both) : std::string(1, static_cast<char>(c));
    }
  }
  return pattern + ")$";
}

std::vector<std::string> present_choices(const Key& key, Check check) {
  std::vector<std::string> names;
  for (const std::string& name : key.choices) {
    const auto& later = key.later_choices;
    const bool present = std::find(later.begin(), later.end(), name) == later.end();
    if (present || check != Check::all) names.push_back(name);
  }
  return names;
}

ordered_json typed_rule(const Key& key, Check check) {
  ordered_json rule;
  if (key.kind == Kind::anything) return ordered_json::object();
  rule["type"] = type_name(key.kind);
  if (!key.choices.empty()) {
    const auto names = present_choices(key, check);
    if (key.any_case) {
      rule["pattern"] = any_case_pattern(names);
    } else {
      rule["enum"] = names;
    }
  }
  if (!key.pattern.empty()) rule["pattern"] = key.pattern;
  if (key.kind != Kind::list) {
    add_range(key, rule);
    return rule;
  }
  if (key.element != Kind::anything) {
    rule["items"]["type"] = type_name(key.element);
    add_range(key, rule["items"]);
  }
  if (key.length) rule["minItems"] = rule["maxItems"] = key.length;
  if (key.or_single) rule["type"] = ordered_json::array({type_name(Kind::list), type_name(key.element)});
  return rule;
}

bool restricted(const Key& key) { return key.status == Status::later; }

/// No other keys than those, but comments.
void close_object(ordered_json& object) {
  object["patternProperties"] = {{R"(^(_|//|\$schema$))", true}};
  object["additionalProperties"] = false;
}

// Accepts the key's type, "auto", and null where null is the default; for a refused key only the values that mean
// 'off'.
ordered_json leaf_rule(const Key& key, Check check) {
  ordered_json rule;
  rule["description"] = key.doc + " " + config::status_words(key);
  if (check == Check::names) return rule;
  if (!key.fallback.is(JsonKind::null)) rule["default"] = as_json(key.fallback);
  const bool nullable = key.fallback.is(JsonKind::null) || key.nullable;
  const bool off_only = restricted(key) && check == Check::all;
  if (off_only && !key.any_case) {
    rule["enum"] = ordered_json::array({as_json(key.fallback), "auto"});
    for (const JsonValue& value : key.off) rule["enum"].push_back(as_json(value));
    return rule;
  }
  Key accepted = key;
  if (off_only) accepted.choices = std::vector<std::string>{key.fallback.string};
  rule["anyOf"] = ordered_json::array({typed_rule(accepted, check)});
  if (!key.must_be_given) rule["anyOf"].push_back({{"const", "auto"}});
  if (nullable && !key.must_be_given) rule["anyOf"].push_back({{"type", "null"}});
  return rule;
}

ordered_json section_rule(const Key& key, Check check);

ordered_json rule_of(const Key& key, Check check) {
  const bool nested = key.kind == Kind::section || key.kind == Kind::dictionary;
  return nested ? section_rule(key, check) : leaf_rule(key, check);
}

void add_properties(const std::vector<Key>& keys, Check check, ordered_json& rule) {
  if (!rule.contains("properties")) rule["properties"] = ordered_json::object();
  for (const Key& key : keys) {
    rule["properties"][key.name] = rule_of(key, check);
    for (const std::string& other : key.other_names) {
      rule["properties"][other] = rule_of(key, check);
      rule["allOf"].push_back({{"not", {{"required", ordered_json::array({key.name, other})}}}});
    }
    if (key.must_be_given) rule["required"].push_back(key.name);
  }
}

// The keys of a section that is off are free, so this restricts only its switch.
ordered_json switch_rule(const Key& key) {
  const size_t dot = key.switch_path.find('.');
  const ordered_json off = {{"enum", ordered_json::array({as_json(key.switch_off), "auto"})}};
  if (dot == std::string::npos) return {{"properties", {{key.switch_path, off}}}};
  const std::string first = key.switch_path.substr(0, dot), second = key.switch_path.substr(dot + 1);
  return {{"properties", {{first, {{"properties", {{second, off}}}}}}}};
}

ordered_json type_condition(const std::vector<std::string>& types) {
  const ordered_json type = {{"type", "string"}, {"pattern", any_case_pattern(types)}};
  return {{"properties", {{"type", type}}}, {"required", ordered_json::array({"type"})}};
}

// The keys allowed in "params" depend on the sibling "type".
void add_variants(const Key& section, Check check, ordered_json& rule) {
  for (const Key& child : section.keys) {
    for (const Variant& variant : child.variants) {
      ordered_json params = {{"type", ordered_json::array({"object", "null"})}};
      add_properties(variant.keys, check, params);
      if (!variant.open) close_object(params);
      ordered_json then = {{"properties", {{child.name, {{"anyOf", {params, {{"const", "auto"}}}}}}}}};
      if (params.contains("required")) {
        then["required"] = ordered_json::array({child.name});
        then["properties"][child.name] = params;
        then["properties"][child.name]["type"] = "object";
      }
      rule["allOf"].push_back({{"if", type_condition(variant.types)}, {"then", then}});
    }
  }
}

ordered_json dictionary_rule(const Key& key, Check check) {
  ordered_json entry = {{"type", "object"}};
  add_properties(key.keys, check, entry);
  close_object(entry);
  ordered_json object = {{"type", "object"}};
  object["additionalProperties"] = entry;
  if (check == Check::names) object["additionalProperties"] = {{"anyOf", {entry, {{"not", {{"type", "object"}}}}}}};
  return object;
}

ordered_json object_rule(const Key& key, Check check) {
  ordered_json object = {{"type", "object"}};
  const bool off_only = restricted(key) && !key.switch_path.empty() && check == Check::all;
  const Check children = off_only ? Check::names : check;
  add_properties(key.keys, children, object);
  add_variants(key, check, object);
  if (off_only) object["allOf"].push_back(switch_rule(key));
  if (key.variants.empty() && !key.open) close_object(object);
  return object;
}

ordered_json section_rule(const Key& key, Check check) {
  ordered_json rule;
  rule["description"] = key.doc + " " + config::status_words(key);
  if (restricted(key) && key.on_when_present && check == Check::all) {
    rule["enum"] = ordered_json::array({nullptr, "auto"});
    return rule;
  }
  const ordered_json object = key.kind == Kind::dictionary ? dictionary_rule(key, check) : object_rule(key, check);
  if (check == Check::names) {
    rule["anyOf"] = ordered_json::array({object, {{"not", {{"type", "object"}}}}});
    return rule;
  }
  rule["anyOf"] = ordered_json::array({object, {{"enum", {nullptr, "auto"}}}});
  if (key.or_boolean) rule["anyOf"].push_back({{"type", "boolean"}});
  if (key.or_first) rule["anyOf"].push_back(typed_rule(key.keys.front(), check));
  // A section that is supported but off may hold any value of the right type.
  if (!key.switch_path.empty() && !restricted(key) && check == Check::all) {
    ordered_json quiet = {{"type", "object"}};
    add_properties(key.keys, Check::types, quiet);
    close_object(quiet);
    quiet["allOf"].push_back(switch_rule(key));
    rule["anyOf"].push_back(quiet);
  }
  return rule;
}

}  // namespace

std::string config_json_schema() {
  ordered_json root;
  root["$schema"] = "https://json-schema.org/draft/2020-12/schema";
  root["title"] = "ds_config.json as Deeptide reads it";
  root["type"] = "object";
  add_properties(config::schema().keys, Check::all, root);
  close_object(root);
  return write_json(root, 1) + "\n";
}

}  // namespace deeptide
