// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parses JSON as people write it (comments, trailing commas) into a tree that remembers lines.
#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/json_relaxed.h"
#include "base/libraries/nlohmann.h"
#include "deeptide/errors.h"

namespace deeptide {
namespace {

constexpr size_t kMaxDepth = 64;  // limits recursion over the tree, its destructor included

// An input iterator that reports how far the parser has read.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* read) : at_(at), read_(read) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*read_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  size_t* read_;
};

class Positions {
 public:
  explicit Positions(std::string_view text) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\n') newlines_.push_back(i);
    }
  }
  int line(size_t offset) const {
    return 1 + static_cast<int>(std::lower_bound(newlines_.begin(), newlines_.end(), offset) - newlines_.begin());
  }
  std::string line_and_column(size_t offset) const {
    const int row = line(offset);
    const size_t begin = row == 1 ? 0 : newlines_[row - 2] + 1;
    return std::to_string(row) + ":" + std::to_string(offset - begin + 1);
  }

 private:
  std::vector<size_t> newlines_;
};

// Builds the tree from nlohmann's events; `read_` is the number of bytes consumed at each event.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string_view text, const std::string& origin) : text_(text), positions_(text), origin_(origin) {}

  size_t* read() { return &read_; }
  const Positions& positions() const { return positions_; }
  JsonValue take() { return std::move(root_); }

  bool null() override { return add(JsonValue()); }
  bool boolean(bool value) override { return add(JsonValue(value)); }
  bool number_integer(number_integer_t value) override { return add(JsonValue(static_cast<int64_t>(value))); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) return add(JsonValue(static_cast<double>(value)));
    return add(JsonValue(static_cast<int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t&) override { return add(JsonValue(value)); }
  bool string(string_t& value) override { return add(JsonValue(std::string_view(value))); }
  bool binary(binary_t&) override { return false; }  // text has no such event

  bool start_object(size_t) override { return open(JsonKind::object); }
  bool start_array(size_t) override { return open(JsonKind::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    JsonValue& object = *open_.back();
    const int line = positions_.line(last_byte());
    if (const JsonMember* first = object.find(name)) {
      throw ConfigError(origin_ + ":" + std::to_string(line) + ": " + path() + name +
                        ": duplicate key, first given on line " + std::to_string(first->line) + "; keep one of them");
    }
    object.members.push_back({name, line, JsonValue()});
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    std::string what = error.what();
    const size_t detail = what.find(" - ");
    if (detail != std::string::npos) what.erase(0, detail + 3);
    const size_t end = what.find_last_not_of(" ;\n");
    what.erase(end + 1);
    const size_t at = what.find("unexpected number literal") == 0 ? last_digit() : last_byte();
    throw ConfigError(origin_ + ":" + positions_.line_and_column(at) + ": malformed JSON: " + what);
  }

 private:
  size_t last_byte() const { return read_ == 0 ? 0 : read_ - 1; }

  // The parser reads one byte past a number, possibly a newline.
  size_t last_digit() const {
    size_t at = last_byte();
    while (at > 0 && (text_[at] < '0' || text_[at] > '9')) --at;
    return at;
  }

  int value_line(const JsonValue& value) const {
    const bool number = value.is(JsonKind::integer) || value.is(JsonKind::number);
    return positions_.line(number ? last_digit() : last_byte());
  }

  JsonValue* place(JsonValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    JsonValue& parent = *open_.back();
    if (parent.is(JsonKind::array)) return &parent.items.emplace_back(std::move(value));
    return &(parent.members.back().value = std::move(value));
  }

  bool add(JsonValue value) {
    value.line = value_line(value);
    place(std::move(value));
    return true;
  }

  bool open(JsonKind kind) {
    if (open_.size() == kMaxDepth) {
      throw ConfigError(origin_ + ":" + positions_.line_and_column(last_byte()) +
                        ": malformed JSON: nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    JsonValue value;
    value.kind = kind;
    value.line = positions_.line(last_byte());
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string path() const {
    std::string path;
    for (size_t i = 0; i + 1 < open_.size(); ++i) {
      if (open_[i]->is(JsonKind::object)) path += open_[i]->members.back().key + ".";
    }
    return path;
  }

  std::string_view text_;
  Positions positions_;
  const std::string& origin_;
  size_t read_ = 0;
  JsonValue root_;
  std::vector<JsonValue*> open_;  // stable: a container grows only while it is the innermost open one
};

std::string quoted(const std::string& text) {
  return write_json(nlohmann::json(text), -1, nlohmann::json::error_handler_t::replace);
}

std::string shortest(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return std::string(buffer, end);
}

}  // namespace

const JsonMember* JsonValue::find(std::string_view key) const {
  const auto found = std::find_if(members.begin(), members.end(), [&](const JsonMember& m) { return m.key == key; });
  return found == members.end() ? nullptr : &*found;
}

bool same_content(const JsonValue& a, const JsonValue& b) {
  const auto numeric = [](const JsonValue& v) { return v.is(JsonKind::integer) || v.is(JsonKind::number); };
  if (a.is(JsonKind::integer) && b.is(JsonKind::integer)) return a.integer == b.integer;
  if (numeric(a) && numeric(b)) return a.number == b.number;
  if (a.kind != b.kind || a.boolean != b.boolean || a.string != b.string) return false;
  const auto same_member = [&](const JsonMember& m) {
    const JsonMember* other = b.find(m.key);
    return other && same_content(m.value, other->value);
  };
  return a.members.size() == b.members.size() &&
         std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), same_content) &&
         std::all_of(a.members.begin(), a.members.end(), same_member);
}

std::string to_text(const JsonValue& value) {
  switch (value.kind) {
    case JsonKind::null:
      return "null";
    case JsonKind::boolean:
      return value.boolean ? "true" : "false";
    case JsonKind::integer:
      return std::to_string(value.integer);
    case JsonKind::number:
      return shortest(value.number);
    case JsonKind::string:
      return quoted(value.string);
    case JsonKind::array:
    case JsonKind::object:
      break;
  }
  const bool array = value.is(JsonKind::array);
  std::string text;
  for (const JsonValue& item : value.items) text += (text.empty() ? "" : ", ") + to_text(item);
  for (const JsonMember& m : value.members)
    text += (text.empty() ? "" : ", ") + quoted(m.key) + ": " + to_text(m.value);
  return array ? "[" + text + "]" : "{" + text + "}";
}

JsonValue parse_json(std::string_view text, const std::string& origin) {
  size_t unclosed = std::string::npos;
  const std::string strict = blank_comments(text, &unclosed);
  TreeBuilder builder(strict, origin);
  const auto refuse = [&](size_t offset, const char* what) {
    throw ConfigError(origin + ":" + builder.positions().line_and_column(offset) + ": malformed JSON: " + what);
  };
  if (unclosed != std::string::npos) refuse(unclosed, "a comment that begins with '/*' never ends; expected '*/'");
  // The parser would read a NUL as the end of the text.
  if (const size_t nul = strict.find('\0'); nul != std::string::npos) refuse(nul, "unexpected NUL byte");
  const CountingIterator begin(strict.data(), builder.read());
  const CountingIterator end(strict.data() + strict.size(), builder.read());
  nlohmann::json::sax_parse(begin, end, &builder);
  return builder.take();
}

}  // namespace deeptide
