// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The one table of every key of ds_config.json: type, default, range, status and reason.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace deeptide::config {

enum class Kind : uint8_t { boolean, integer, number, word, list, anything, section, dictionary };

/// honoured: does what it says. either: any value is accepted, since it asks for what is done anyway.
/// later: not supported yet, only the default or an 'off' value is accepted. never: the same, since it has no effect
/// here.
enum class Status : uint8_t { honoured, either, later, never };

struct Variant;

/// One key. Made by the functions below and refined by its setters, which return the key itself.
struct Key {
  std::string name;
  Kind kind = Kind::anything;
  std::string doc;
  JsonValue fallback;  // null: absent
  Status status = Status::honoured;
  std::string reason;   // of a status other than honoured
  std::string derived;  // what an absent value becomes, in words
  std::vector<std::string> other_names;
  std::string torch_name;                  // of a hyper-parameter whose name in torch differs
  std::vector<std::string> choices;        // of a word
  std::vector<std::string> later_choices;  // known, not supported yet
  bool any_case = false;                   // choices match without regard to case
  std::optional<double> lowest, highest;
  bool lowest_excluded = false, highest_excluded = false;
  Kind element = Kind::anything;  // of a list
  size_t length = 0;              // of a list; 0: any
  bool must_be_given = false;
  bool list_later = false;        // a list of values is known, not supported yet
  std::vector<JsonValue> off;     // accepted beside the default when the status is later or never
  std::vector<Key> keys;          // of a section, or of each entry of a dictionary
  std::vector<Variant> variants;  // further keys of a section, chosen by "type" beside it
  bool open = false;              // a section whose other keys go unread
  bool or_boolean = false;        // a section that may be written true or false
  std::string switch_path;        // the value below the section that turns it on
  JsonValue switch_off;           // ... and the value that leaves it off
  bool on_when_present = false;

  Key at_least(double value) &&;
  Key above(double value) &&;
  Key between(double low, double high) &&;
  Key below_one() &&;  // [0, 1)
  Key either(std::string why) &&;
  Key later(std::string why = "") &&;
  Key never(std::string why) &&;
  Key off_at(JsonValue value) &&;
  Key alias(std::string other) &&;
  Key in_torch(std::string name) &&;
  Key derives(std::string words) &&;
  Key ignoring_case() &&;
  Key not_yet(std::vector<std::string> values) &&;
  Key required() &&;
  Key or_list() &&;
  Key switched_by(std::string path, JsonValue off_value = JsonValue(false)) &&;
  Key when_present() &&;
  Key leaves_open() &&;
  Key or_flag() &&;
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
const Key &schema();

/// Whether `variant` holds for `type`, without regard to case where the type's key allows it.
const Variant *find_variant(const Key &section, std::string_view type);

bool same_word(std::string_view a, std::string_view b, bool any_case);

/// "an integer from 0 to 3", "one of \"mean\", \"sum\"".
std::string describe_expected(const Key &key);

}  // namespace deeptide::config
