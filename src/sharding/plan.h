// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Predicts which units are needed next: follows the last pass's order with a cursor. A hint, never a contract.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace deeptide::sharding {

/// Records the units as a pass touches them (repeats in a row count once) and predicts from the previous pass. Starts
/// with module order, forward and back. Needs no tensors and no peers, so a plan can be simulated.
class Plan {
 public:
  /// `numels`: the elements of each unit, in module order. `backward`: a pass visits them forward, then in reverse.
  Plan(std::vector<int64_t> numels, bool backward);

  /// Records that the pass has reached `unit`.
  void visit(int unit);
  /// Ends the pass: its record becomes the prediction.
  void finish_pass();

  /// Returns the distinct units predicted after the current one, nearest first, at most `limit`.
  std::vector<int> upcoming(int limit) const;
  /// Returns the distinct units with which the pass after this one is predicted to begin, at most `limit`.
  std::vector<int> start(int limit) const;
  /// Visits until `unit` is needed again; empty if the rest of the pass does not visit it.
  std::optional<int64_t> distance(int unit) const;
  /// Elements of the units visited until `unit` is needed again.
  std::optional<int64_t> elements_until(int unit) const;
  const std::vector<int>& order() const { return order_; }
  bool recorded() const { return recorded_; }

 private:
  void index_order();
  std::optional<int64_t> next_position(int unit) const;

  std::vector<int64_t> numels_;                  // by unit
  std::vector<int> order_;                       // predicted
  std::vector<std::vector<int64_t>> positions_;  // by unit: where it is in order_, ascending
  std::vector<int64_t> elements_before_;         // by position in order_, and one for its end
  std::vector<int> trace_;                       // being recorded
  int64_t cursor_ = -1;                          // position of the current unit in order_
  int64_t max_trace_;                            // an endless pass (generation) stops recording here
  bool recorded_ = false;
};

}  // namespace deeptide::sharding
