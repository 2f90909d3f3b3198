// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The one table of every key of ds_config.json: type, default, range, status, reason and the field that it fills.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/json.h"
#include "deeptide/config.h"

namespace deeptide::config {

enum class Kind : uint8_t { boolean, integer, number, word, list, anything, section, dictionary };

/// honoured: has the effect that its text describes. either: accepts any value, since all of them ask for what happens
/// anyway. later: its absence would change numbers, memory or behaviour, and it is not supported yet; accepts the
/// default and 'off' values only. never: has no effect here, or its wish is met in another way; accepted, and told at
/// the start.
enum class Status : uint8_t { honoured, either, later, never };

struct Key;
struct Variant;

/// The field of a configuration that a key fills. Made by Key::into.
struct Binding {
  std::function<void(const Key& key, const JsonValue& value, Config::Sections& sections)> fill;
  /// The field's content as the text would give it; null where the field is absent.
  std::function<JsonValue(const Key& key, const Config::Sections& sections)> read;
};

/// One key. Made by the functions below and refined by its setters, which return the key itself.
struct Key {
  std::string name;
  Kind kind = Kind::anything;
  std::string doc;
  JsonValue fallback;  // null: absent
  Status status = Status::honoured;
  std::string reason;     // of a status other than honoured
  std::string derived;    // in words: the meaning of an absent value
  std::string sibling;    // when absent, the value of this key of the same section
  std::string auto_path;  // when "auto", the value of the key at this path, if the text has its section
  std::string automatic;  // in words: the meaning of "auto", where it is not that of an absent value
  std::optional<Binding> binding;
  std::string reader;  // of a key without a field: the code that acts on it
  std::vector<std::string> other_names;
  std::string torch_name;                       // of a hyper-parameter whose name in torch differs
  bool config_only = false;                     // of an optimizer's params: no number of its param groups
  std::vector<std::string> choices;             // of a word
  std::vector<int64_t> enumerators;             // of the enumeration below, one for each choice
  const std::type_info* enumeration = nullptr;  // of a choice whose field is an enumeration
  std::vector<std::string> later_choices;       // known, not supported yet
  std::string later_reason;                     // ... and why
  bool any_case = false;                        // choices match without regard to case
  std::string pattern;                          // of a word: what its reader takes, for the published schema
  std::optional<double> lowest, highest;
  bool lowest_excluded = false, highest_excluded = false;
  Kind element = Kind::anything;  // of a list
  size_t length = 0;              // of a list; 0: any
  bool must_be_given = false;
  bool nullable = false;          // null asks for the default, though there is one
  bool list_later = false;        // a list of values is known, not supported yet
  bool or_single = false;         // a list that may be written as its only element
  std::vector<JsonValue> off;     // asks for nothing, as the default does
  std::vector<Key> keys;          // of a section, or of each entry of a dictionary
  std::vector<Variant> variants;  // further keys of a section, chosen by its sibling "type"
  bool open = false;              // a section that accepts unknown keys and ignores them
  bool or_boolean = false;        // a section that may be written true or false
  bool or_first = false;          // a section that may be written as the value of its first key, an integer
  std::string switch_path;        // the value below the section that turns it on
  JsonValue switch_off;           // ... and the value that leaves it off
  bool on_when_present = false;

  /// Fills `field`, whose type must suit the kind. Defined in "config/table/binding.h".
  template <class Section, class Field>
  Key into(Field Section::*field) &&;
  /// Fills no field: `who` reads the value. Of a section: neither do its keys.
  Key read_by(std::string who) &&;

  Key at_least(double value) &&;
  Key above(double value) &&;
  Key between(double low, double high) &&;
  Key below_one() &&;  // [0, 1)
  Key either(std::string why) &&;
  Key later(std::string why = "") &&;
  Key never(std::string why) &&;
  Key off_at(JsonValue value) &&;
  Key alias(std::string other) &&;
  Key in_torch(std::string other) &&;
  Key not_in_groups() &&;
  Key derives(std::string words) &&;
  Key derives_from(std::string sibling_name) &&;
  Key auto_from(std::string path) &&;
  Key auto_means(std::string words) &&;
  Key ignoring_case() &&;
  Key not_yet(std::vector<std::string> values, std::string why = "") &&;
  Key required() &&;
  Key or_null() &&;
  Key or_list() &&;
  Key or_one() &&;
  Key matching(std::string regular_expression) &&;
  Key switched_by(std::string path, JsonValue off_value = JsonValue(false)) &&;
  Key when_present() &&;
  Key leaves_open() &&;
  Key or_flag() &&;
  Key or_first_key() &&;
  Key by_type(std::vector<Variant> choices) &&;
};

/// The keys of a section whose sibling "type" is one of `types`.
struct Variant {
  std::vector<std::string> types;
  std::vector<Key> keys;
  bool open = false;
  bool later = false;  // known, not supported yet
};

Key flag(std::string name, std::optional<bool> fallback, std::string doc);
Key enabled();  // a section's own flag, off unless given
Key integer(std::string name, std::optional<int64_t> fallback, std::string doc);
Key number(std::string name, std::optional<double> fallback, std::string doc);
Key word(std::string name, std::optional<std::string> fallback, std::string doc);
Key choice(std::string name, std::optional<std::string> fallback, std::vector<std::string> choices, std::string doc);
Key list(std::string name, Kind element, std::optional<std::vector<JsonValue>> fallback, std::string doc);
Key anything(std::string name, std::string doc);
Key section(std::string name, std::string doc, std::vector<Key> keys);
Key dictionary(std::string name, std::string doc, std::vector<Key> keys);
std::vector<JsonValue> words(std::initializer_list<std::string_view> values);
std::vector<JsonValue> numbers(std::initializer_list<double> values);

/// The root: a section without a name.
const Key& schema();

/// The key at `path`, e.g. "zero_optimization.stage"; null when there is none. Does not look into variants.
const Key* find_key(std::string_view path);

/// The variant of `section` for `type`, compared without regard to case; null when there is none.
const Variant* find_variant(const Key& section, std::string_view type);

bool same_word(std::string_view a, std::string_view b, bool any_case);

/// The index of `word` among the key's choices, compared as the key says; choices.size() when it is none of them.
size_t find_choice(const Key& key, std::string_view word);

/// The integer that `value` holds; 5e8 is one.
int64_t as_integer(const JsonValue& value);

/// "an integer from 0 to 3", "one of \"mean\", \"sum\"".
std::string describe_expected(const Key& key);

}  // namespace deeptide::config
