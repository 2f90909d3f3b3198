// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts layouts into spans.
// Cuts layouts into spans.
#include "ops/attention/spans.h"

#include <algorithm>

namespace deeptide::ops {
namespace {

std::vector<Range> columns_of(const int64_t* row, int64_t count, int64_t block) {
  std::vector<Range> columns;
  for (int64_t column = 0; column < count; ++column) {
    if (row[column] == 0) continue;
    const int64_t begin = column * block;
    if (!columns.empty() && columns.back().begin + columns.back().count == begin) {
      columns.back().count += block;
    } else {
      columns.push_back({begin, block});
    }
  }
  return columns;
}

std::vector<Span> spans_of(const int64_t* layout, int64_t side, int64_t block, bool causal, int64_t most) {
  std::vector<Span> spans;
  for (int64_t row = 0; row < side; ++row) {
    Span span{{row * block, block}, columns_of(layout + row * side, causal ? row + 1 : side, block)};
    if (span.columns.empty()) continue;
    const bool joins = !spans.empty() && spans.back().columns == span.columns &&
                       spans.back().rows.begin + spans.back().rows.count == span.rows.begin &&
                       (spans.back().rows.count + block) * span.num_columns() <= most;
    if (joins) {
      spans.back().rows.count += block;
    } else {
      spans.push_back(std::move(span));
    }
  }
  return spans;
}

}  // namespace

int64_t Span::num_columns() const {
  int64_t count = 0;
  for (const Range& range : columns) count += range.count;
  return count;
}

std::vector<HeadGroup> head_groups(const at::Tensor& layout, int64_t block, bool causal, int64_t most) {
  const int64_t num_heads = layout.size(0), side = layout.size(1), numel = side * side;
  const auto* data = layout.const_data_ptr<int64_t>();
  std::vector<HeadGroup> groups;
  for (int64_t head = 0; head < num_heads; ++head) {
    const int64_t* own = data + head * numel;
    const auto alike = std::find_if(groups.begin(), groups.end(), [&](const HeadGroup& group) {
      return std::equal(own, own + numel, data + group.heads.front() * numel);
    });
    if (alike == groups.end()) {
      groups.push_back({{head}, spans_of(own, side, block, causal, most)});
    } else {
      alike->heads.push_back(head);
    }
  }
  return groups;
}

}  // namespace deeptide::ops
