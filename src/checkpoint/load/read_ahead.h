// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets the system fetch tensors that are read one after another, some blocks before they are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/piece_table.h"

namespace deeptide::checkpoint {

class ReadAhead {
 public:
  /// Files lie in `folder`.
  explicit ReadAhead(std::string folder) : folder_(std::move(folder)) {}

  /// A tensor that is read after those before, from front to back. It must outlive this.
  void add(const Logical& tensor);
  /// Elements of a tensor, by the order of `add`, are read up to `end`: has those fetched that come next. A hint.
  void read(size_t tensor, int64_t end);

 private:
  struct Reading {
    const Logical* tensor;
    int64_t numel;
    int64_t begin;  // in bytes of all tensors
  };

  std::string folder_;
  std::vector<Reading> tensors_;
  int64_t bytes_ = 0;   // of all
  size_t next_ = 0;     // the tensor that is announced next
  int64_t within_ = 0;  // from which element on
};

}  // namespace deeptide::checkpoint
