// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts by length, and by sums of weights.
#include "deeptide/pipeline_partition.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "deeptide/pipeline_schedule.h"

namespace deeptide {
namespace {

/// Parts of the first items of a list.
struct Cut {
  double most = 0.0, least = std::numeric_limits<double>::infinity();  // sums of parts
  std::vector<int64_t> bounds = {0};
  double spread() const { return most - least; }
};

std::vector<double> sums_of(const std::vector<double>& weights) {
  std::vector<double> sums(1, 0.0);
  for (const double weight : weights) sums.push_back(sums.back() + weight);
  return sums;
}

/// Bounds of parts with items each, of which the costliest costs least. cost: of (part, begin, end).
template <typename Cost>
std::vector<int64_t> least_largest(const Cost& cost, int64_t num_items, int num_parts) {
  if (num_items < num_parts) return uniform_bounds(num_items, num_parts);
  struct Best {
    double largest = 0.0;
    std::vector<int64_t> bounds = {0};
  };
  std::vector<std::optional<Best>> best(num_items + 1);  // by the number of items taken
  best[0] = Best();
  for (int part = 0; part < num_parts; ++part) {
    std::vector<std::optional<Best>> following(num_items + 1);
    for (int64_t begin = 0; begin < num_items; ++begin) {
      if (!best[begin]) continue;
      for (int64_t end = begin + 1; end <= num_items - (num_parts - 1 - part); ++end) {
        const double largest = std::max(best[begin]->largest, cost(part, begin, end));
        if (following[end] && following[end]->largest <= largest) continue;
        following[end] = Best{largest, best[begin]->bounds};
        following[end]->bounds.push_back(end);
      }
    }
    best = std::move(following);
  }
  return best[num_items]->bounds;
}

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
  const std::vector<double> sums = sums_of(weights);
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

std::vector<int64_t> bounds_by_time(const std::vector<double>& times, int num_parts) {
  const std::vector<double> sums = sums_of(times);
  const auto cost = [&](int /*part*/, int64_t begin, int64_t end) { return sums[end] - sums[begin]; };
  return least_largest(cost, std::ssize(times), num_parts);
}

std::vector<int64_t> bounds_by_memory(const std::vector<double>& states, const std::vector<double>& kept, int stages,
                                      int chunks) {
  const auto schedule = chunks == 1 ? PipelineSchedule::one_f_one_b : PipelineSchedule::interleaved;
  const std::vector<int> peaks = simulate(schedule, {stages, 4 * stages, chunks}).peak_activations;
  const std::vector<double> of_states = sums_of(states), of_kept = sums_of(kept);
  const auto cost = [&](int part, int64_t begin, int64_t end) {
    const double alive = static_cast<double>(peaks[part % stages]) / chunks;
    return of_states[end] - of_states[begin] + alive * (of_kept[end] - of_kept[begin]);
  };
  return least_largest(cost, std::ssize(states), stages * chunks);
}

}  // namespace deeptide
