// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes values and tensors as torch.save pickles them.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/libraries/nlohmann.h"

namespace deeptide::checkpoint {

/// One value, in protocol 2. Each call adds a value, or a key of the innermost dict before its value. Tensors are told
/// of alone: their elements are records of the archive, numbered in the order of calls.
/// Source: CPython's Lib/pickletools.py; torch.serialization's persistent ids.
class PickleWriter {
 public:
  PickleWriter() : text_("\x80\x02", 2) {}

  void begin_dict() { text_ += "}("; }
  void end_dict() { text_ += 'u'; }
  void begin_list() { text_ += "]("; }
  void end_list() { text_ += 'e'; }
  void text(const std::string& value);
  void integer(int64_t value);
  /// Objects as dicts, arrays as lists.
  void json(const nlohmann::json& value);
  /// An array as a tuple.
  void tuple(const nlohmann::json& values);
  /// A torch.Size.
  void size(const std::vector<int64_t>& shape);
  /// A contiguous tensor on the CPU that requires no gradient. False, and nothing is added, where torch has no storage
  /// of this type.
  [[nodiscard]] bool tensor(const std::vector<int64_t>& shape, c10::ScalarType dtype);

  void begin_tuple() { text_ += '('; }
  void end_tuple() { text_ += 't'; }
  /// A class or a function, by its name in Python.
  void global(const char* module, const char* name);
  /// Calls the function before the last tuple with it.
  void call() { text_ += 'R'; }
  /// An instance of a class, whose state follows, a dict or a tuple, and then set_state().
  void instance(const char* module, const char* name);
  void set_state() { text_ += 'b'; }
  /// "torch.float32" and so on. False, and nothing is added, for a type that torch has no storage of.
  [[nodiscard]] bool dtype(c10::ScalarType dtype);

  /// The pickle, whole.
  std::string finish() { return text_ + '.'; }

 private:
  void real(double value);
  void integers(const std::vector<int64_t>& values);
  void little(uint64_t value, int bytes);

  std::string text_;
  int64_t num_tensors_ = 0;
};

}  // namespace deeptide::checkpoint
