// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Fills rows by best fit, from the longest sequence down.
#include "deeptide/packing.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <utility>

namespace deeptide {

using at::Tensor;

namespace {

double lowest_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return -65504.0;
  if (dtype == at::kBFloat16) return static_cast<double>(std::numeric_limits<c10::BFloat16>::lowest());
  return dtype == at::kDouble ? std::numeric_limits<double>::lowest()
                              : static_cast<double>(std::numeric_limits<float>::lowest());
}

}  // namespace

std::vector<std::vector<int64_t>> pack_lengths(std::span<const int64_t> lengths, int64_t row_length) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length_of = [&](int64_t sequence) { return lengths[static_cast<size_t>(sequence)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length_of(a) > length_of(b); });
  std::vector<std::vector<int64_t>> rows;
  std::set<std::pair<int64_t, size_t>> rooms;  // (room, row): the fullest first, of equal ones the first
  for (const int64_t sequence : order) {
    const int64_t length = length_of(sequence);
    if (length <= 0 || length > row_length) {
      throw ConfigError("pack_lengths: sequence " + std::to_string(sequence) + " has " + std::to_string(length) +
                        " tokens, expected 1 to row_length, " + std::to_string(row_length) + "; cut it");
    }
    const auto found = rooms.lower_bound({length, 0});
    const auto [room, row] = found == rooms.end() ? std::pair(row_length, rows.size()) : *found;
    if (found == rooms.end()) {
      rows.emplace_back();
    } else {
      rooms.erase(found);
    }
    rows[row].push_back(sequence);
    if (room > length) rooms.insert({room - length, row});
  }
  for (auto& row : rows) std::sort(row.begin(), row.end());
  std::sort(rows.begin(), rows.end());
  return rows;
}

Tensor block_diagonal_mask(const Tensor& sequence_ids, bool causal, at::ScalarType dtype) {
  const int64_t length = sequence_ids.size(-1);
  Tensor same = sequence_ids.unsqueeze(-1).eq(sequence_ids.unsqueeze(-2));
  if (causal) same = same.logical_and(at::ones({length, length}, same.options()).tril());
  same = same.unsqueeze(1);
  if (dtype == at::kBool) return same;
  return at::zeros(same.sizes(), same.options().dtype(dtype)).masked_fill(same.logical_not(), lowest_of(dtype));
}

}  // namespace deeptide
