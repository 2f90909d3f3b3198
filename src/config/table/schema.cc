// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Making and finding keys of the table; the table itself is in schema_*.cc, one file per group of sections.
#include "config/table/schema.h"

#include <algorithm>
#include <cctype>
#include <iterator>

#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key make(std::string name, Kind kind, std::string doc) {
  Key key;
  key.name = std::move(name);
  key.kind = kind;
  key.doc = std::move(doc);
  return key;
}

JsonValue array_of(std::vector<JsonValue> items) {
  JsonValue value;
  value.kind = JsonKind::array;
  value.items = std::move(items);
  return value;
}

// Gives a section's status to its keys as well, except to those that have a status of their own.
void spread(Key& key, Status status, const std::string& why) {
  if (key.status != Status::honoured) return;
  key.status = status;
  key.reason = why;
  for (Key& child : key.keys) spread(child, status, why);
  for (Variant& variant : key.variants) {
    for (Key& child : variant.keys) spread(child, status, why);
  }
}

void spread_reader(Key& key, const std::string& who) {
  key.reader = who;
  for (Key& child : key.keys) spread_reader(child, who);
  for (Variant& variant : key.variants) {
    for (Key& child : variant.keys) spread_reader(child, who);
  }
}

std::string range_words(const Key& key) {
  const auto text = [](double value) {
    return to_text(value == static_cast<double>(static_cast<int64_t>(value)) ? JsonValue(static_cast<int64_t>(value))
                                                                             : JsonValue(value));
  };
  if (key.lowest && key.highest) {
    return " from " + text(*key.lowest) + " to " + text(*key.highest) + (key.highest_excluded ? " (excluded)" : "");
  }
  if (key.lowest) return (key.lowest_excluded ? " above " : " of at least ") + text(*key.lowest);
  return "";
}

const Key& build_schema() {
  static Key root = make("", Kind::section, "The whole of ds_config.json.");
  for (const auto part : {top_level_keys, optimizer_sections, scheduler_sections, precision_sections, zero_sections,
                          runtime_sections, activation_sections, monitor_sections, checkpoint_sections,
                          parallel_sections, compile_sections, data_sections, compression_sections, tuning_sections}) {
    std::vector<Key> keys = part();
    std::move(keys.begin(), keys.end(), std::back_inserter(root.keys));
  }
  return root;
}

}  // namespace

Key Key::at_least(double value) && {
  lowest = value;
  return std::move(*this);
}

Key Key::above(double value) && {
  lowest = value;
  lowest_excluded = true;
  return std::move(*this);
}

Key Key::between(double low, double high) && {
  lowest = low;
  highest = high;
  return std::move(*this);
}

Key Key::below_one() && {
  highest_excluded = true;
  return std::move(*this).between(0.0, 1.0);
}

Key Key::either(std::string why) && {
  status = Status::either;
  reason = std::move(why);
  return std::move(*this);
}

Key Key::later(std::string why) && {
  spread(*this, Status::later, why);
  return std::move(*this);
}

Key Key::never(std::string why) && {
  spread(*this, Status::never, why);
  return std::move(*this);
}

Key Key::off_at(JsonValue value) && {
  off.push_back(std::move(value));
  return std::move(*this);
}

Key Key::alias(std::string other) && {
  other_names.push_back(std::move(other));
  return std::move(*this);
}

Key Key::in_torch(std::string other) && {
  torch_name = std::move(other);
  return std::move(*this);
}

Key Key::not_in_groups() && {
  config_only = true;
  return std::move(*this);
}

Key Key::read_by(std::string who) && {
  spread_reader(*this, who);
  return std::move(*this);
}

Key Key::derives(std::string words) && {
  derived = std::move(words);
  return std::move(*this);
}

Key Key::derives_from(std::string sibling_name) && {
  sibling = sibling_name;
  return std::move(*this).derives(std::move(sibling_name));
}

Key Key::auto_means(std::string words) && {
  automatic = std::move(words);
  return std::move(*this);
}

Key Key::auto_from(std::string path) && {
  auto_path = std::move(path);
  return std::move(*this);
}

Key Key::ignoring_case() && {
  any_case = true;
  return std::move(*this);
}

Key Key::not_yet(std::vector<std::string> values, std::string why) && {
  later_choices = std::move(values);
  later_reason = std::move(why);
  return std::move(*this);
}

Key Key::required() && {
  must_be_given = true;
  return std::move(*this);
}

Key Key::or_null() && {
  nullable = true;
  return std::move(*this);
}

Key Key::or_list() && {
  list_later = true;
  return std::move(*this);
}

Key Key::or_one() && {
  or_single = true;
  return std::move(*this);
}

Key Key::matching(std::string regular_expression) && {
  pattern = std::move(regular_expression);
  return std::move(*this);
}

Key Key::switched_by(std::string path, JsonValue off_value) && {
  switch_path = std::move(path);
  switch_off = std::move(off_value);
  return std::move(*this);
}

Key Key::when_present() && {
  on_when_present = true;
  return std::move(*this);
}

Key Key::leaves_open() && {
  open = true;
  return std::move(*this);
}

Key Key::or_flag() && {
  or_boolean = true;
  return std::move(*this);
}

Key Key::or_first_key() && {
  or_first = true;
  return std::move(*this);
}

Key Key::by_type(std::vector<Variant> choices_by_type) && {
  variants = std::move(choices_by_type);
  return std::move(*this);
}

Key flag(std::string name, std::optional<bool> fallback, std::string doc) {
  Key key = make(std::move(name), Kind::boolean, std::move(doc));
  if (fallback) key.fallback = JsonValue(*fallback);
  return key;
}

Key enabled() { return flag("enabled", false, "Use it."); }

Key integer(std::string name, std::optional<int64_t> fallback, std::string doc) {
  Key key = make(std::move(name), Kind::integer, std::move(doc));
  if (fallback) key.fallback = JsonValue(*fallback);
  return key;
}

Key number(std::string name, std::optional<double> fallback, std::string doc) {
  Key key = make(std::move(name), Kind::number, std::move(doc));
  if (fallback) key.fallback = JsonValue(*fallback);
  return key;
}

Key word(std::string name, std::optional<std::string> fallback, std::string doc) {
  Key key = make(std::move(name), Kind::word, std::move(doc));
  if (fallback) key.fallback = JsonValue(std::string_view(*fallback));
  return key;
}

Key choice(std::string name, std::optional<std::string> fallback, std::vector<std::string> choices, std::string doc) {
  Key key = word(std::move(name), std::move(fallback), std::move(doc));
  key.choices = std::move(choices);
  return key;
}

Key list(std::string name, Kind element, std::optional<std::vector<JsonValue>> fallback, std::string doc) {
  Key key = make(std::move(name), Kind::list, std::move(doc));
  key.element = element;
  if (fallback) key.fallback = array_of(std::move(*fallback));
  return key;
}

Key anything(std::string name, std::string doc) { return make(std::move(name), Kind::anything, std::move(doc)); }

Key section(std::string name, std::string doc, std::vector<Key> keys) {
  Key key = make(std::move(name), Kind::section, std::move(doc));
  key.keys = std::move(keys);
  return key;
}

Key dictionary(std::string name, std::string doc, std::vector<Key> keys) {
  Key key = make(std::move(name), Kind::dictionary, std::move(doc));
  key.keys = std::move(keys);
  return key;
}

std::vector<JsonValue> words(std::initializer_list<std::string_view> values) {
  std::vector<JsonValue> items;
  for (std::string_view value : values) items.emplace_back(value);
  return items;
}

std::vector<JsonValue> numbers(std::initializer_list<double> values) {
  std::vector<JsonValue> items;
  for (double value : values) items.emplace_back(value);
  return items;
}

const Key& schema() {
  static const Key& root = build_schema();
  return root;
}

bool same_word(std::string_view a, std::string_view b, bool any_case) {
  const auto same = [&](unsigned char x, unsigned char y) {
    return any_case ? std::tolower(x) == std::tolower(y) : x == y;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

const Key* find_key(std::string_view path) {
  const Key* key = &schema();
  while (key && !path.empty()) {
    const std::string_view name = path.substr(0, path.find('.'));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    const auto found = std::find_if(key->keys.begin(), key->keys.end(), [&](const Key& k) { return k.name == name; });
    key = found == key->keys.end() ? nullptr : &*found;
  }
  return key;
}

size_t find_choice(const Key& key, std::string_view word) {
  const auto found = std::find_if(key.choices.begin(), key.choices.end(),
                                  [&](const std::string& name) { return same_word(name, word, key.any_case); });
  return static_cast<size_t>(found - key.choices.begin());
}

int64_t as_integer(const JsonValue& value) {
  return value.is(JsonKind::number) ? static_cast<int64_t>(value.number) : value.integer;
}

const Variant* find_variant(const Key& section, std::string_view type) {
  for (const Variant& variant : section.variants) {
    for (const std::string& name : variant.types) {
      if (same_word(name, type, true)) return &variant;
    }
  }
  return nullptr;
}

std::string describe_expected(const Key& key) {
  static const char* const kElements[] = {"booleans", "integers", "numbers", "words", "lists", "values"};
  switch (key.kind) {
    case Kind::boolean:
      return "true or false";
    case Kind::integer:
      return "an integer" + range_words(key);
    case Kind::number:
      return "a number" + range_words(key);
    case Kind::word:
      break;
    case Kind::list:
      return std::string(key.or_single ? "one value or " : "") + "a list of " +
             (key.length ? std::to_string(key.length) + " " : "") +
             kElements[std::min<size_t>(static_cast<size_t>(key.element), 5)] + range_words(key);
    case Kind::anything:
      return "a value";
    case Kind::section:
      if (key.or_first) return "an object, or " + describe_expected(key.keys.front());
      return key.or_boolean ? "an object, true or false" : "an object";
    case Kind::dictionary:
      return "an object with one entry per name";
  }
  if (key.choices.empty()) return "a word in double quotes";
  std::string names;
  for (const std::string& name : key.choices) names += (names.empty() ? "\"" : ", \"") + name + "\"";
  return "one of " + names;
}

}  // namespace deeptide::config
