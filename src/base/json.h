// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// JSON as people write it (comments, trailing commas) into a tree that remembers lines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deeptide {

struct JsonMember;

enum class JsonKind : uint8_t { null, boolean, integer, number, string, array, object };

/// A value and the line on which it ends (objects and arrays: begins). Integers beyond 64 bits are numbers.
struct JsonValue {
  JsonKind kind = JsonKind::null;
  int line = 0;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0.0;  // also set for integers
  std::string string;
  std::vector<JsonValue> items;
  std::vector<JsonMember> members;  // in the order of the text

  JsonValue() = default;
  explicit JsonValue(bool value);
  explicit JsonValue(int64_t value);
  explicit JsonValue(double value);
  explicit JsonValue(std::string_view value);

  bool is(JsonKind wanted) const { return kind == wanted; }
  /// The member called `key`, or null.
  const JsonMember* find(std::string_view key) const;
};

struct JsonMember {
  std::string key;
  int line = 0;
  JsonValue value;
};

// Defined here because each needs a complete JsonMember.
inline JsonValue::JsonValue(bool value) : kind(JsonKind::boolean), boolean(value) {}
inline JsonValue::JsonValue(int64_t value)
    : kind(JsonKind::integer), integer(value), number(static_cast<double>(value)) {}
inline JsonValue::JsonValue(double value) : kind(JsonKind::number), number(value) {}
inline JsonValue::JsonValue(std::string_view value) : kind(JsonKind::string), string(value) {}

/// Compares content; ignores lines, and 1 equals 1.0.
bool same_content(const JsonValue& a, const JsonValue& b);

/// Writes compact JSON; numbers in their shortest exact form.
std::string to_text(const JsonValue& value);

/// Reads one value. Allows `#`, `//` and `/* */` comments and trailing commas; refuses duplicate keys.
/// Errors: ConfigError "origin:line:column: …" for malformed text, "origin:line: path: …" for duplicate keys.
JsonValue parse_json(std::string_view text, const std::string& origin);

}  // namespace deeptide
