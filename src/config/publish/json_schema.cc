// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// config_json_schema: the table as a JSON Schema, draft 2020-12.
#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "config/publish/publish.h"
#include "deeptide/config.h"

namespace deeptide {
namespace {

using config::Key;
using config::Kind;
using config::Status;
using config::Variant;
using nlohmann::ordered_json;

ordered_json as_json(const JsonValue& value) { return ordered_json::parse(to_text(value)); }

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

std::vector<std::string> present_choices(const Key& key, bool muted) {
  std::vector<std::string> names;
  for (const std::string& name : key.choices) {
    const auto& later = key.later_choices;
    if (muted || std::find(later.begin(), later.end(), name) == later.end()) names.push_back(name);
  }
  return names;
}

ordered_json typed_rule(const Key& key, bool muted) {
  ordered_json rule;
  if (key.kind == Kind::anything) return ordered_json::object();
  rule["type"] = type_name(key.kind);
  if (!key.choices.empty()) {
    const auto names = present_choices(key, muted);
    if (key.any_case) {
      rule["pattern"] = any_case_pattern(names);
    } else {
      rule["enum"] = names;
    }
  }
  if (key.kind != Kind::list) {
    add_range(key, rule);
    return rule;
  }
  if (key.element != Kind::anything) {
    rule["items"]["type"] = type_name(key.element);
    add_range(key, rule["items"]);
  }
  if (key.length) rule["minItems"] = rule["maxItems"] = key.length;
  return rule;
}

bool restricted(const Key& key) { return key.status == Status::later || key.status == Status::never; }

// Accepts the key's type, "auto", and null where null is the default; for a refused key only the values that mean
// 'off'.
ordered_json leaf_rule(const Key& key, bool muted) {
  ordered_json rule;
  rule["description"] = key.doc + " " + config::status_words(key);
  if (!key.fallback.is(JsonKind::null)) rule["default"] = as_json(key.fallback);
  const bool nullable = key.fallback.is(JsonKind::null);
  if (restricted(key) && !muted && !key.any_case) {
    rule["enum"] = ordered_json::array({as_json(key.fallback), "auto"});
    for (const JsonValue& value : key.off) rule["enum"].push_back(as_json(value));
    return rule;
  }
  Key accepted = key;
  if (restricted(key) && !muted) accepted.choices = std::vector<std::string>{key.fallback.string};
  rule["anyOf"] = ordered_json::array({typed_rule(accepted, muted)});
  if (!key.must_be_given) rule["anyOf"].push_back({{"const", "auto"}});
  if (nullable && !key.must_be_given) rule["anyOf"].push_back({{"type", "null"}});
  return rule;
}

ordered_json section_rule(const Key& key, bool muted);

ordered_json rule_of(const Key& key, bool muted) {
  const bool nested = key.kind == Kind::section || key.kind == Kind::dictionary;
  return nested ? section_rule(key, muted) : leaf_rule(key, muted);
}

void add_properties(const std::vector<Key>& keys, bool muted, ordered_json& rule) {
  if (!rule.contains("properties")) rule["properties"] = ordered_json::object();
  for (const Key& key : keys) {
    rule["properties"][key.name] = rule_of(key, muted);
    for (const std::string& other : key.other_names) {
      rule["properties"][other] = rule_of(key, muted);
      rule["allOf"].push_back({{"not", {{"required", ordered_json::array({key.name, other})}}}});
    }
    if (key.must_be_given) rule["required"].push_back(key.name);
  }
}

// A disabled section may hold any value of the right type (`muted`), so this restricts only its switch.
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
void add_variants(const Key& section, bool muted, ordered_json& rule) {
  for (const Key& child : section.keys) {
    for (const Variant& variant : child.variants) {
      ordered_json params = {{"type", ordered_json::array({"object", "null"})}};
      add_properties(variant.keys, muted, params);
      if (!variant.open) params["additionalProperties"] = false;
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

ordered_json section_rule(const Key& key, bool muted) {
  const bool refused = restricted(key);
  ordered_json rule;
  rule["description"] = key.doc + " " + config::status_words(key);
  if (refused && key.on_when_present && !muted) {
    rule["enum"] = ordered_json::array({nullptr, "auto"});
    return rule;
  }
  ordered_json object = {{"type", "object"}};
  if (key.kind == Kind::dictionary) {
    ordered_json entry = {{"type", "object"}};
    add_properties(key.keys, muted, entry);
    entry["additionalProperties"] = false;
    object["additionalProperties"] = entry;
  } else {
    const bool can_be_off = !key.switch_path.empty() && !muted;
    add_properties(key.keys, muted || (can_be_off && refused), object);
    add_variants(key, muted, object);
    if (can_be_off && refused) object["allOf"].push_back(switch_rule(key));
    if (key.variants.empty() && !key.open) object["additionalProperties"] = false;
  }
  rule["anyOf"] = ordered_json::array({object, {{"enum", {nullptr, "auto"}}}});
  if (key.or_boolean) rule["anyOf"].push_back({{"type", "boolean"}});
  // A section that is honoured but off may hold any value, too.
  if (!key.switch_path.empty() && !refused && !muted) {
    ordered_json quiet = {{"type", "object"}, {"additionalProperties", false}};
    add_properties(key.keys, true, quiet);
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
  add_properties(config::schema().keys, false, root);
  root["additionalProperties"] = false;
  return root.dump(1) + "\n";
}

}  // namespace deeptide
