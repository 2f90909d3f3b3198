// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The facts that an operator's schema states about its arguments and results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace deeptide::deferred {

struct Traits {
  uint64_t writes = 0;         // bit i: argument i is written
  bool views_only = false;     // returns views of its arguments and writes none: needs no data of its own
  bool collective = false;     // still runs after it has returned
  bool composite = false;      // made of other operators only
  bool changes_shape = false;  // in place, and of the tensor alone: squeeze_, t_
  bool sets_memory = false;    // points its first argument at the second's memory
  bool random = false;         // draws from a generator
  bool overwrites = false;     // writes all of argument 0 without reading it
  bool makes_tensors = false;  // returns new tensors and nothing else
  bool reads_shape = false;    // of its tensors, and not their values: zeros_like, new_empty
  bool copies = false;         // its result is its argument in other memory, type or order
  int device = -1;             // these arguments' places
  int dtype = -1;
  int generator = -1;
  std::vector<int> returns_argument;  // by result: the argument that it is, or -1 for a new tensor
  bool writes_argument(size_t i) const { return i < 64 && (writes >> i & 1) != 0; }
};

inline bool is_one_of(const std::string& name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Reads an operator's schema, once per thread.
const Traits& traits_of(const c10::OperatorHandle& op);

/// Calls `visit(item, tensor)` for each defined tensor of an argument; item: its place in a list, or -1.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(-1, value.toTensor());
  } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    int item = 0;
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) visit(item, element.toTensor());
      ++item;
    }
  }
}

}  // namespace deeptide::deferred
