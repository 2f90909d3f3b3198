// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The stack machine of pickles. Source: the opcodes' descriptions in CPython's Lib/pickletools.py.
#include "checkpoint/imports/archives/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "checkpoint/format/json_field.h"

namespace deeptide::checkpoint {

using Kind = PickleValue::Kind;

namespace {

constexpr const char* kMappings[] = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter"};

class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, const std::string& where, std::deque<PickleValue>& values)
      : bytes_(bytes), where_(where), values_(values) {}

  const PickleValue* run() {
    while (true) {
      const auto op = read<uint8_t>();
      if (op == '.') break;  // STOP
      if (!simple(op) && !counted(op) && !container(op) && !object(op) && !memo(op)) refuse_opcode(op);
    }
    if (!marks_.empty() || stack_.size() != 1) wrong("it ends with " + std::to_string(stack_.size()) + " values");
    return stack_.back();
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    malformed(where_, "its pickle is wrong at byte " + std::to_string(position_) + ": " + what);
  }
  [[noreturn]] void refuse_opcode(uint8_t op) const {
    wrong("opcode " + std::to_string(op) + " is none that torch.save writes");
  }

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - position_) wrong("it ends within a value (was it truncated?)");
    const std::string_view part = bytes_.substr(position_, count);
    position_ += count;
    return part;
  }
  template <typename Number>
  Number read() {
    Number number;
    std::memcpy(&number, take(sizeof number).data(), sizeof number);
    return number;
  }
  std::string read_line() {
    const size_t end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) wrong("a line has no end");
    const std::string line(take(end - position_));
    ++position_;
    return line;
  }

  PickleValue& make(Kind kind) {
    if (values_.size() == Pickle::kMaxValues) wrong("it has more values than any state that is read here");
    PickleValue& value = values_.emplace_back();
    value.kind = kind;
    stack_.push_back(&value);
    return value;
  }
  void make_text(Kind kind, uint64_t count) { make(kind).text = take(count); }
  void make_integer(int64_t integer) { make(Kind::integer).integer = integer; }

  PickleValue* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) wrong("an opcode finds no value");
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue& top() {
    PickleValue* value = pop();
    stack_.push_back(value);
    return *value;
  }
  /// All above the last mark, which goes.
  std::vector<const PickleValue*> pop_to_mark() {
    if (marks_.empty()) wrong("an opcode finds no mark");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const PickleValue*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }

  /// Little-endian two's complement of any length.
  void make_long(uint64_t count) {
    const std::string_view digits = take(count);
    if (count <= 8) {
      uint64_t number = !digits.empty() && (digits.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
      std::memcpy(&number, digits.data(), digits.size());
      return make_integer(static_cast<int64_t>(number));
    }
    static constexpr char kDigits[] = "0123456789abcdef";
    const bool negative = (digits.back() & 0x80) != 0;
    std::string text = negative ? "-0x" : "0x";
    std::string magnitude(digits);
    if (negative) negate(magnitude);
    for (auto digit = magnitude.rbegin(); digit != magnitude.rend(); ++digit) {
      const auto byte = static_cast<uint8_t>(*digit);
      text += kDigits[byte >> 4];
      text += kDigits[byte & 15];
    }
    make(Kind::big).text = std::move(text);
  }
  static void negate(std::string& digits) {
    bool carry = true;
    for (char& digit : digits) {
      const int sum = static_cast<uint8_t>(~digit) + (carry ? 1 : 0);
      digit = static_cast<char>(sum & 0xff);
      carry = sum > 0xff;
    }
  }

  bool simple(uint8_t op) {
    switch (op) {
      case 0x80: {  // PROTO
        const auto protocol = read<uint8_t>();
        if (protocol < 2 || protocol > 5) wrong("protocol " + std::to_string(protocol) + " is none of 2 to 5");
        return true;
      }
      case 0x95:  // FRAME
        if (read<uint64_t>() > bytes_.size() - position_) wrong("a frame is longer than the pickle");
        return true;
      case 'N':
        make(Kind::none);
        return true;
      case 0x88:
      case 0x89:
        make(Kind::boolean).flag = op == 0x88;
        return true;
      case 'J':
        make_integer(read<int32_t>());
        return true;
      case 'K':
        make_integer(read<uint8_t>());
        return true;
      case 'M':
        make_integer(read<uint16_t>());
        return true;
      case 'G': {
        uint64_t bits = 0;
        for (const char byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
        make(Kind::real).real = std::bit_cast<double>(bits);
        return true;
      }
      default:
        return false;
    }
  }

  /// Whether an opcode begins with its own length.
  bool counted(uint8_t op) {
    switch (op) {
      case 0x8a:
        make_long(read<uint8_t>());
        return true;
      case 0x8b:
        make_long(read<uint32_t>());
        return true;
      case 0x8c:
        make_text(Kind::text, read<uint8_t>());
        return true;
      case 'X':
        make_text(Kind::text, read<uint32_t>());
        return true;
      case 0x8d:
        make_text(Kind::text, read<uint64_t>());
        return true;
      case 'U':
        make_text(Kind::text, read<uint8_t>());  // a str of Python 2
        return true;
      case 'T':
        make_text(Kind::text, read<uint32_t>());
        return true;
      case 'C':
        make_text(Kind::bytes, read<uint8_t>());
        return true;
      case 'B':
        make_text(Kind::bytes, read<uint32_t>());
        return true;
      case 0x8e:
      case 0x96:
        make_text(Kind::bytes, read<uint64_t>());
        return true;
      default:
        return false;
    }
  }

  void make_tuple(size_t count) {
    std::vector<const PickleValue*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    make(Kind::tuple).items = std::move(items);
  }
  void make_of_mark(Kind kind) {
    std::vector<const PickleValue*> items = pop_to_mark();
    make(kind).items = std::move(items);
  }
  /// Lists, sets and objects take items; whether an object could, only its class would know.
  void extend(const std::vector<const PickleValue*>& items, Kind kind) {
    PickleValue& target = top();
    if (target.kind != kind && target.kind != Kind::object) wrong("items are added to what takes none");
    target.items.insert(target.items.end(), items.begin(), items.end());
  }
  void set_entries(const std::vector<const PickleValue*>& items) {
    PickleValue& target = top();
    if (target.kind != Kind::dict && target.kind != Kind::object) wrong("keys are set in what has none");
    if (items.size() % 2 != 0) wrong("a key has no value");
    for (size_t i = 0; i < items.size(); i += 2) target.entries.emplace_back(items[i], items[i + 1]);
  }

  bool container(uint8_t op) {
    switch (op) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':  // POP
        if (!marks_.empty() && stack_.size() == marks_.back()) {
          marks_.pop_back();
        } else {
          pop();
        }
        return true;
      case '1':
        pop_to_mark();
        return true;
      case '2':
        stack_.push_back(&top());
        return true;
      case ')':
        make(Kind::tuple);
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        make_tuple(op - 0x84U);
        return true;
      case 't':
        make_of_mark(Kind::tuple);
        return true;
      case ']':
        make(Kind::list);
        return true;
      case 'l':
        make_of_mark(Kind::list);
        return true;
      case '}':
        make(Kind::dict);
        return true;
      case 0x8f:
        make(Kind::set);
        return true;
      case 0x91:  // FROZENSET
        make_of_mark(Kind::set);
        return true;
      default:
        return fill(op);
    }
  }

  bool fill(uint8_t op) {
    switch (op) {
      case 'a': {
        const PickleValue* item = pop();
        extend({item}, Kind::list);
        return true;
      }
      case 'e':
        extend(pop_to_mark(), Kind::list);
        return true;
      case 0x90:
        extend(pop_to_mark(), Kind::set);
        return true;
      case 's': {
        const PickleValue* value = pop();
        const PickleValue* key = pop();
        set_entries({key, value});
        return true;
      }
      case 'u':
        set_entries(pop_to_mark());
        return true;
      case 'd': {
        const std::vector<const PickleValue*> items = pop_to_mark();
        make(Kind::dict);
        set_entries(items);
        return true;
      }
      default:
        return false;
    }
  }

  void make_global(std::string module, const std::string& name) {
    make(Kind::global).text = std::move(module) + "." + name;
  }
  /// REDUCE, NEWOBJ: notes what would be called, with what.
  void make_object() {
    const PickleValue* arguments = pop();
    const PickleValue* callee = pop();
    if (callee->kind != Kind::global) wrong("what it would call is no name of a module");
    if (arguments->kind != Kind::tuple) wrong("the arguments of '" + callee->text.substr(0, 80) + "' are no tuple");
    PickleValue& made = make(Kind::object);
    made.callee = callee;
    made.arguments = arguments;
  }

  bool object(uint8_t op) {
    switch (op) {
      case 'c': {  // GLOBAL
        std::string module = read_line();
        const std::string name = read_line();
        make_global(std::move(module), name);
        return true;
      }
      case 0x93: {  // STACK_GLOBAL
        const PickleValue* name = pop();
        const PickleValue* module = pop();
        if (name->kind != Kind::text || module->kind != Kind::text) wrong("a global's name is no text");
        make_global(module->text, name->text);
        return true;
      }
      case 'R':
      case 0x81:
        make_object();
        return true;
      case 0x92: {  // NEWOBJ_EX
        const PickleValue* keywords = pop();
        make_object();
        top().state = keywords;
        return true;
      }
      case 'b': {  // BUILD
        const PickleValue* state = pop();
        if (top().kind != Kind::object) wrong("a state is given to what is no object");
        top().state = state;
        return true;
      }
      case 'Q': {  // BINPERSID
        const PickleValue* id = pop();
        make(Kind::persistent).items = {id};
        return true;
      }
      default:
        return false;
    }
  }

  void recall(uint32_t slot) {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) wrong("memo " + std::to_string(slot) + " is not there");
    stack_.push_back(found->second);
  }

  bool memo(uint8_t op) {
    switch (op) {
      case 'q':
        memo_[read<uint8_t>()] = &top();
        return true;
      case 'r':
        memo_[read<uint32_t>()] = &top();
        return true;
      case 0x94:  // MEMOIZE
        memo_[static_cast<uint32_t>(memo_.size())] = &top();
        return true;
      case 'h':
        recall(read<uint8_t>());
        return true;
      case 'j':
        recall(read<uint32_t>());
        return true;
      default:
        return false;
    }
  }

  std::string_view bytes_;
  const std::string& where_;
  std::deque<PickleValue>& values_;
  size_t position_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;  // heights of the stack
  std::unordered_map<uint32_t, PickleValue*> memo_;
};

}  // namespace

bool PickleValue::is_made_by(std::string_view global) const { return kind == Kind::object && callee->text == global; }

bool PickleValue::is_mapping() const {
  return kind == Kind::dict ||
         (kind == Kind::object &&
          std::any_of(std::begin(kMappings), std::end(kMappings), [&](const char* name) { return is_made_by(name); }));
}

const PickleValue* PickleValue::find(std::string_view key) const {
  if (!is_mapping()) return nullptr;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (entry->first->kind != Kind::text || entry->first->text != key) continue;
    return entry->second->is(Kind::none) ? nullptr : entry->second;
  }
  return nullptr;
}

Pickle::Pickle(std::string_view bytes, const std::string& where) { root_ = PickleMachine(bytes, where, values_).run(); }

}  // namespace deeptide::checkpoint
