// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records and follows the order of units.
#include "sharding/plan.h"

#include <algorithm>

namespace deeptide::sharding {

namespace {

std::vector<int> distinct(const std::vector<int>& order, int64_t first, int limit) {
  std::vector<int> units;
  for (int64_t at = first; at < static_cast<int64_t>(order.size()) && static_cast<int>(units.size()) < limit; ++at) {
    const bool known = std::find(units.begin(), units.end(), order[at]) != units.end();
    if (!known) units.push_back(order[at]);
  }
  return units;
}

}  // namespace

Plan::Plan(std::vector<int64_t> numels, bool backward)
    : numels_(std::move(numels)), max_trace_(64 + 64 * static_cast<int64_t>(numels_.size())) {
  const int num_units = static_cast<int>(numels_.size());
  for (int i = 0; i < num_units; ++i) order_.push_back(i);
  for (int i = num_units - 1; backward && i >= 0; --i) order_.push_back(i);
  index_order();
}

/// So that each question takes logarithmic time: models of a thousand units ask for every victim at every gather.
void Plan::index_order() {
  positions_.assign(numels_.size(), {});
  elements_before_.assign(1, 0);
  for (size_t at = 0; at < order_.size(); ++at) {
    positions_[order_[at]].push_back(static_cast<int64_t>(at));
    elements_before_.push_back(elements_before_.back() + numels_[order_[at]]);
  }
}

/// Returns the first position after the cursor at which the unit is predicted.
std::optional<int64_t> Plan::next_position(int unit) const {
  const auto& positions = positions_[unit];
  const auto next = std::upper_bound(positions.begin(), positions.end(), cursor_);
  if (next == positions.end()) return std::nullopt;
  return *next;
}

void Plan::visit(int unit) {
  if (!trace_.empty() && trace_.back() == unit) return;
  if (static_cast<int64_t>(trace_.size()) < max_trace_) trace_.push_back(unit);
  // The next occurrence, wrapping round: a loop without step() repeats.
  if (const auto next = next_position(unit)) {
    cursor_ = *next;
  } else if (!positions_[unit].empty()) {
    cursor_ = positions_[unit].front();
  }
}

void Plan::finish_pass() {
  if (!trace_.empty()) {
    order_ = std::move(trace_);
    recorded_ = true;
    index_order();
  }
  trace_.clear();
  cursor_ = -1;
}

std::vector<int> Plan::upcoming(int limit) const { return distinct(order_, cursor_ + 1, limit); }

std::vector<int> Plan::start(int limit) const { return distinct(trace_.empty() ? order_ : trace_, 0, limit); }

std::optional<int64_t> Plan::distance(int unit) const {
  const auto next = next_position(unit);
  return next ? std::optional(*next - cursor_) : std::nullopt;
}

std::optional<int64_t> Plan::elements_until(int unit) const {
  const auto next = next_position(unit);
  return next ? std::optional(elements_before_[*next] - elements_before_[cursor_ + 1]) : std::nullopt;
}

}  // namespace deeptide::sharding
