// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the text once more, along the table.
#include "config/section.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "config/table/schema.h"

namespace deeptide::config {
namespace {

bool leaves_default(const JsonValue& value) {
  return value.is(JsonKind::null) || (value.is(JsonKind::string) && value.string == "auto");
}

const JsonValue* find_given(const Key& key, const JsonValue* object) {
  if (!object || !object->is(JsonKind::object)) return nullptr;
  const JsonMember* member = object->find(key.name);
  for (const std::string& other : key.other_names) {
    if (!member) member = object->find(other);
  }
  return member && !leaves_default(member->value) ? &member->value : nullptr;
}

JsonValue object_of(const Key& section, const JsonValue* given);

JsonValue value_of(const Key& key, const JsonValue* given) {
  if (key.kind == Kind::section) return object_of(key, given);
  if (key.kind != Kind::dictionary) return given ? *given : key.fallback;
  JsonValue entries;
  entries.kind = JsonKind::object;
  if (!given || !given->is(JsonKind::object)) return entries;
  for (const JsonMember& entry : given->members) {
    if (!entry.value.is(JsonKind::object)) continue;
    entries.members.push_back({entry.key, entry.line, object_of(key, &entry.value)});
  }
  return entries;
}

JsonValue object_of(const Key& section, const JsonValue* given) {
  JsonValue object;
  object.kind = JsonKind::object;
  if (given) object.line = given->line;
  for (const Key& key : section.keys) {
    const bool is_given = section.or_first && given && !given->is(JsonKind::object) && &key == &section.keys.front();
    const JsonValue* value = is_given ? given : find_given(key, given);
    object.members.push_back({key.name, value ? value->line : object.line, value_of(key, value)});
  }
  return object;
}

}  // namespace

JsonValue section_with_defaults(const Config& config, std::string_view path) {
  const Key* key = find_key(path);
  if (!key || key->kind != Kind::section) throw std::logic_error("no section of the table: " + std::string(path));
  const JsonValue root = parse_json(config.text(), config.origin());
  const JsonValue* given = &root;
  for (std::string_view rest = path; given && !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find('.'));
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
    const JsonMember* member = given->is(JsonKind::object) ? given->find(name) : nullptr;
    given = member && !leaves_default(member->value) ? &member->value : nullptr;
  }
  return object_of(*key, given);
}

}  // namespace deeptide::config
