// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Records and follows the order of units.
#include "sharding/plan.h"

#include <algorithm>

namespace deeptide::sharding {

Plan::Plan(int num_units, bool backward) : max_trace_(64 + 64 * static_cast<int64_t>(num_units)) {
  for (int i = 0; i < num_units; ++i) order_.push_back(i);
  for (int i = num_units - 1; backward && i >= 0; --i) order_.push_back(i);
}

void Plan::visit(int unit) {
  if (!trace_.empty() && trace_.back() == unit) return;
  if (static_cast<int64_t>(trace_.size()) < max_trace_) trace_.push_back(unit);
  follow(unit);
}

void Plan::follow(int unit) {
  const auto size = static_cast<int64_t>(order_.size());
  for (int64_t step = 1; step <= size; ++step) {  // next occurrence, wrapping round: a loop without step() repeats
    const int64_t at = (cursor_ + step) % size;
    if (order_[at] == unit) {
      cursor_ = at;
      return;
    }
  }
}

void Plan::finish_pass() {
  if (!trace_.empty()) {
    order_ = std::move(trace_);
    recorded_ = true;
  }
  trace_.clear();
  cursor_ = -1;
}

std::vector<int> Plan::upcoming(int limit) const {
  std::vector<int> units;
  for (int64_t at = cursor_ + 1; at < static_cast<int64_t>(order_.size()) && static_cast<int>(units.size()) < limit;
       ++at) {
    const bool known = std::find(units.begin(), units.end(), order_[at]) != units.end();
    if (!known) units.push_back(order_[at]);
  }
  return units;
}

std::optional<int64_t> Plan::distance(int unit) const {
  for (int64_t at = cursor_ + 1; at < static_cast<int64_t>(order_.size()); ++at) {
    if (order_[at] == unit) return at - cursor_;
  }
  return std::nullopt;
}

std::optional<int64_t> Plan::elements_until(int unit, const std::function<int64_t(int)>& numel_of) const {
  int64_t elements = 0;
  for (int64_t at = cursor_ + 1; at < static_cast<int64_t>(order_.size()); ++at) {
    if (order_[at] == unit) return elements;
    elements += numel_of(order_[at]);
  }
  return std::nullopt;
}

}  // namespace deeptide::sharding
