// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Every key of the table as a test case: a text that holds this key, and values that suit it or do not.
#include "config/table_cases.h"

#include <set>

#include "config/check/check_value.h"
#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide::config {
namespace {

bool nested(const Key& key) { return key.kind == Kind::section || key.kind == Kind::dictionary; }

void walk(const std::vector<Key>& keys, const std::vector<const Key*>& sections, const Variant* variant,
          bool want_sections, std::vector<TableCase>& found) {
  for (const Key& key : keys) {
    if (nested(key) == want_sections) found.push_back({&key, sections, variant});
    std::vector<const Key*> inner = sections;
    inner.push_back(&key);
    walk(key.keys, inner, nullptr, want_sections, found);
    for (const Variant& v : key.variants) walk(v.keys, inner, &v, want_sections, found);
  }
}

std::vector<TableCase> collect(bool want_sections) {
  std::vector<TableCase> found;
  walk(schema().keys, {}, nullptr, want_sections, found);
  return found;
}

std::string member(const std::string& name, const std::string& value) { return "\"" + name + "\": " + value; }

std::string on_value(const Key& section) {
  if (section.switch_off.is(JsonKind::boolean)) return "true";
  return section.switch_off.is(JsonKind::string) ? "\"cpu\"" : "2";
}

std::string required_siblings(const TableCase& c, const std::string& name) {
  std::string text;
  if (!c.variant) return text;
  for (const Key& key : c.variant->keys) {
    if (key.must_be_given && key.name != name) text += ", " + member(key.name, "5");
  }
  return text;
}

JsonValue parsed(const std::string& text) { return parse_json(text, "value"); }

}  // namespace

std::string TableCase::path() const {
  std::string path;
  for (const Key* section : sections) path += section->name + (section->kind == Kind::dictionary ? ".one." : ".");
  return path + key->name;
}

std::string TableCase::text(const std::string& name, const std::string& value, bool switched_on) const {
  std::string open = "{\n", close = "\n}";
  std::string pending;  // the rest of an outer section's switch path, and its value
  std::string pending_value;
  for (size_t i = 0; i < sections.size(); ++i) {
    const Key& section = *sections[i];
    const bool last = i + 1 == sections.size();
    if (last && variant) open += member("type", "\"" + variant->types.front() + "\"") + ", ";
    open += "\"" + section.name + "\": {";
    if (section.kind == Kind::dictionary) {
      open += "\"one\": {";
      close = "}" + close;
    }
    close = "}" + close;
    const std::string next = last ? name : sections[i + 1]->name;
    std::string on = section.switch_path;
    std::string on_with = on.empty() ? pending_value : on_value(section);
    if (!pending.empty()) on = pending;
    pending.clear();
    if (!switched_on || on.empty()) continue;
    const size_t dot = on.find('.');
    const std::string first = on.substr(0, dot);
    if (first == next && dot != std::string::npos) {
      pending = on.substr(dot + 1);
      pending_value = on_with;
    } else if (first != next) {
      open += (dot == std::string::npos ? member(first, on_with)
                                        : member(first, "{" + member(on.substr(dot + 1), on_with) + "}")) +
              ", ";
    }
  }
  return open + "\n" + member(name, value) + required_siblings(*this, name) + close;
}

std::string TableCase::text(const std::string& value, bool switched_on) const {
  return text(key->name, value, switched_on);
}

std::vector<TableCase> all_leaves() { return collect(false); }

std::vector<TableCase> all_sections() { return collect(true); }

bool depends_on_another(const Key& key) {
  static const std::set<std::string> kNames = {
      "nesterov",      "grad_accum_dtype",         "param_dtype", "bf16_optimizer_states",
      "packed_states", "quantized_error_feedback", "memory"};
  const bool is_share = key.reader == "config::read_placement";  // the shares of all tiers must add up
  return is_share || kNames.contains(key.name);
}

std::string other_value(const Key& key) {
  std::vector<std::string> candidates = {"true", "false", "7",         "8",   "0.5",         "0.25",
                                         "1.5",  "2",     "\"other\"", "[7]", "[0.5, 0.25]", "[3, 2, 1]"};
  for (const std::string& name : key.choices) candidates.push_back("\"" + name + "\"");
  candidates.push_back("[\"other\"]");
  const auto off = [&](const JsonValue& value) {
    for (const JsonValue& quiet : key.off) {
      if (same_content(quiet, value)) return true;
    }
    return same_content(key.fallback, value);
  };
  for (const std::string& text : candidates) {
    const JsonValue value = parsed(text);
    if (type_problem(key, value).empty() && !off(value)) return text;
  }
  return "";
}

std::vector<std::string> wrong_values(const Key& key) {
  if (key.kind == Kind::anything) return {};
  if (nested(key)) return {key.or_first ? "true" : "1", "[]", "\"word\""};
  std::vector<std::string> values = {"{}"};
  if (key.kind != Kind::boolean) values.push_back("true");
  if (key.kind != Kind::integer && key.kind != Kind::number) values.push_back("1");
  if (key.kind == Kind::integer) values.insert(values.end(), {"0.5", "\"1\"", "1e300", "9223372036854775808"});
  if (key.kind == Kind::boolean) values.insert(values.end(), {"0", "\"true\""});
  if (key.kind == Kind::number) values.push_back("\"0.5\"");
  if (key.kind == Kind::word && !key.choices.empty()) values.push_back("\"no such word\"");
  if (key.kind == Kind::list && !key.or_single) values.push_back("\"word\"");
  if (key.kind == Kind::list && key.length) values.push_back("[0.5]");
  const bool number = key.kind == Kind::integer || key.kind == Kind::number;
  if (number && key.lowest) values.push_back(to_text(JsonValue(*key.lowest - 1)));
  if (number && key.lowest && key.lowest_excluded) values.push_back(to_text(JsonValue(*key.lowest)));
  if (number && key.highest) values.push_back(to_text(JsonValue(*key.highest + (key.highest_excluded ? 0 : 1))));
  return values;
}

std::string error_of(const std::string& text) {
  try {
    Config::from_text(text, "ds_config.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace deeptide::config
