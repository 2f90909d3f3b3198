// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts by length, and by sums of weights.
#include "deeptide/pipeline_partition.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace deeptide {
namespace {

/// Parts of the first items of a list.
struct Cut {
  double most = 0.0, least = std::numeric_limits<double>::infinity();  // sums of parts
  std::vector<int64_t> bounds = {0};
  double spread() const { return most - least; }
};

}  // namespace

std::vector<int64_t> uniform_bounds(int64_t num_items, int num_parts) {
  std::vector<int64_t> bounds;
  for (int64_t part = 0; part <= num_parts; ++part) {
    bounds.push_back(part * (num_items / num_parts) + std::min(part, num_items % num_parts));
  }
  return bounds;
}

std::vector<int64_t> balanced_bounds(const std::vector<double>& weights, int num_parts) {
  const auto num_items = std::ssize(weights);
  if (num_items <= num_parts) return uniform_bounds(num_items, num_parts);
  std::vector<double> sums(1, 0.0);
  for (const double weight : weights) sums.push_back(sums.back() + weight);
  std::vector<std::optional<Cut>> best(num_items + 1);  // by the number of items taken
  best[0] = Cut();
  for (int part = 0; part < num_parts; ++part) {
    std::vector<std::optional<Cut>> following(num_items + 1);
    for (int64_t end = 1; end <= num_items; ++end) {
      for (int64_t begin = 0; begin < end; ++begin) {
        if (!best[begin]) continue;
        const double own = sums[end] - sums[begin];
        Cut cut = {std::max(best[begin]->most, own), std::min(best[begin]->least, own), best[begin]->bounds};
        if (following[end] && cut.spread() > following[end]->spread()) continue;
        cut.bounds.push_back(end);
        following[end] = std::move(cut);
      }
    }
    best = std::move(following);
  }
  return best[num_items]->bounds;
}

}  // namespace deeptide
