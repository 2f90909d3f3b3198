// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads pickles into plain records. Nothing in a pickle is ever called: not a class, not a function. Needs no torch.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace deeptide::checkpoint {

/// A value of a pickle. Values may refer to each other in circles, as Python's do; their Pickle owns them all.
struct PickleValue {
  enum class Kind : uint8_t {
    none,
    boolean,     // flag
    integer,     // integer
    big,         // text: an integer beyond 64 bits, in hexadecimal with its sign
    real,        // real
    text,        // text, UTF-8 or Python's surrogates
    bytes,       // text
    list,        // items
    tuple,       // items
    set,         // items
    dict,        // entries, in their order; the last of equal keys counts
    global,      // text: "module.name"
    object,      // callee and arguments; what was appended, set by key or given as its state
    persistent,  // items[0]: what torch.save says of a storage
  };
  using Entry = std::pair<const PickleValue*, const PickleValue*>;

  Kind kind = Kind::none;
  bool flag = false;
  int64_t integer = 0;
  double real = 0.0;
  std::string text;
  std::vector<const PickleValue*> items;
  std::vector<Entry> entries;
  const PickleValue* callee = nullptr;     // of an object
  const PickleValue* arguments = nullptr;  // likewise: a tuple
  const PickleValue* state = nullptr;      // likewise; null: none

  bool is(Kind other) const { return kind == other; }
  /// Whether it is an object that this class or function would have made: "collections.OrderedDict".
  bool is_made_by(std::string_view global) const;
  /// A dict, or an object that Python would read like one: OrderedDict, defaultdict, Counter.
  bool is_mapping() const;
  /// The value that a mapping has under a text; null: none, or None, which DeepSpeed writes for what it leaves out.
  /// Errors: none, for any kind of value.
  const PickleValue* find(std::string_view key) const;
};

/// Protocols 2 to 5, as far as torch.save and Python's pickler write them.
class Pickle {
 public:
  /// Errors: CheckpointError, naming `where` and the byte, for what is malformed, truncated, of another protocol, or of
  /// more than kMaxValues values.
  Pickle(std::string_view bytes, const std::string& where);
  Pickle(Pickle&&) noexcept = default;
  Pickle& operator=(Pickle&&) noexcept = default;

  const PickleValue& root() const { return *root_; }

  static constexpr size_t kMaxValues = 8'000'000;

 private:
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace deeptide::checkpoint
