// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What will be needed next: the last pass's order of units, followed with a cursor. A hint, never a contract.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace deeptide::sharding {

/// Records the units as a pass touches them (repeats in a row count once) and predicts from the pass before.
/// Starts with module order, there and back. Runs without memory and without peers.
class Plan {
 public:
  /// `num_units` in module order; `backward`: a pass goes through them and back again.
  Plan(int num_units, bool backward);

  /// The pass has reached `unit`.
  void visit(int unit);
  /// The pass has ended: what it recorded becomes the prediction.
  void finish_pass();

  /// The distinct units predicted after the present one, nearest first, at most `limit`.
  std::vector<int> upcoming(int limit) const;
  /// Visits until `unit` is needed again; empty when the plan does not hold it in the rest of the pass.
  std::optional<int64_t> distance(int unit) const;
  /// Elements of the units on the way until `unit` is needed again; `numel_of(unit)` gives a unit's size.
  std::optional<int64_t> elements_until(int unit, const std::function<int64_t(int)>& numel_of) const;
  const std::vector<int>& order() const { return order_; }
  bool recorded() const { return recorded_; }

 private:
  void follow(int unit);

  std::vector<int> order_;  // predicted
  std::vector<int> trace_;  // being recorded
  int64_t cursor_ = -1;     // of the present unit in order_
  int64_t max_trace_;       // a pass without an end (generation) stops recording here
  bool recorded_ = false;
};

}  // namespace deeptide::sharding
