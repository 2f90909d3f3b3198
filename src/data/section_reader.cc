// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads numbers and words of a section, naming what is missing.
#include "data/section_reader.h"

#include <cmath>

namespace deeptide::data {
namespace {

bool is_integer(const JsonValue& value) {
  return value.is(JsonKind::integer) ||
         (value.is(JsonKind::number) && std::abs(value.number) < 0x1p62 && value.number == std::floor(value.number));
}

int64_t integer_of(const JsonValue& value) {
  return value.is(JsonKind::integer) ? value.integer : static_cast<int64_t>(value.number);
}

}  // namespace

void SectionReader::fail(std::string_view key, const std::string& what) const {
  throw ConfigError(name_ + "." + std::string(key) + ": " + what);
}

const JsonValue& SectionReader::find(std::string_view key, const char* expected) const {
  const JsonMember* member = section_.find(key);
  if (!member || member->value.is(JsonKind::null)) fail(key, std::string("missing; expected ") + expected);
  return member->value;
}

bool SectionReader::has(std::string_view key) const {
  const JsonMember* member = section_.find(key);
  return member && !member->value.is(JsonKind::null);
}

int64_t SectionReader::integer(std::string_view key) const {
  const JsonValue& value = find(key, "an integer");
  if (!is_integer(value)) fail(key, "got " + to_text(value) + ", expected an integer");
  return integer_of(value);
}

std::string SectionReader::word(std::string_view key) const {
  const JsonValue& value = find(key, "a word");
  if (!value.is(JsonKind::string)) fail(key, "got " + to_text(value) + ", expected a word");
  return value.string;
}

std::vector<int64_t> SectionReader::integers(std::string_view key) const {
  const JsonValue& value = find(key, "a list of integers");
  std::vector<int64_t> numbers;
  for (const JsonValue& item : value.items) {
    if (!is_integer(item)) fail(key, "got " + to_text(value) + ", expected a list of integers");
    numbers.push_back(integer_of(item));
  }
  if (numbers.empty()) fail(key, "got " + to_text(value) + ", expected at least one integer");
  return numbers;
}

SectionReader SectionReader::below(std::string_view key) const {
  const JsonValue& value = find(key, "an object");
  if (!value.is(JsonKind::object)) fail(key, "got " + to_text(value) + ", expected an object");
  return {value, name_ + "." + std::string(key)};
}

}  // namespace deeptide::data
