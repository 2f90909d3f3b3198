// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts a list into consecutive parts: part p has the items [bounds[p], bounds[p + 1]).
#pragma once

#include <cstdint>
#include <vector>

#include "deeptide/export.h"

namespace deeptide {

/// Bounds of parts of nearly equal length, the longer ones first.
DEEPTIDE_API std::vector<int64_t> uniform_bounds(int64_t num_items, int num_parts);
/// Bounds of parts whose sums differ little: part by part, the cut that keeps the largest and the smallest closest, of
/// equal cuts the later one. This is DeepSpeed's rule, so that a model is cut as it cuts it.
DEEPTIDE_API std::vector<int64_t> balanced_bounds(const std::vector<double>& weights, int num_parts);

}  // namespace deeptide
