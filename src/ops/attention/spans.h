// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A layout as work: heads that attend alike, and rows of blocks that attend to the same columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace deeptide::ops {

/// Consecutive elements of a sequence.
struct Range {
  int64_t begin = 0, count = 0;

  bool operator==(const Range&) const = default;
};

/// Rows that attend to the same columns. Columns ascend, and no two ranges touch.
struct Span {
  Range rows;
  std::vector<Range> columns;

  int64_t num_columns() const;
};

/// Heads with one layout, and their spans; rows that attend to nothing are in none.
struct HeadGroup {
  std::vector<int64_t> heads;
  std::vector<Span> spans;
};

/// Cuts a layout (H, B, B) of 0 and 1 into spans of at most `most` scores each, and one row of blocks at least.
/// `causal` leaves out the blocks after a row's own.
std::vector<HeadGroup> head_groups(const at::Tensor& layout, int64_t block, bool causal, int64_t most);

}  // namespace deeptide::ops
