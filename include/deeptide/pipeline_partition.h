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
/// Bounds of parts with items each, of which the slowest is fastest, of equal cuts the first. Units: any one of time.
DEEPTIDE_API std::vector<int64_t> bounds_by_time(const std::vector<double>& times, int num_parts);
/// Likewise of parts of which the largest is smallest: part p lies on stage p % stages, and has the states of its items
/// and what they keep of as many micro-batches as 1f1b, or with chunks the interleaved schedule, has alive there.
/// Units: bytes, of each item.
DEEPTIDE_API std::vector<int64_t> bounds_by_memory(const std::vector<double>& states, const std::vector<double>& kept,
                                                   int stages, int chunks);

}  // namespace deeptide
