// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which gradient is not finite, and which rank contributed it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "gradients/route/route.h"
#include "numerics/sums/ordered_sum.h"
#include "sharding/unit.h"

namespace deeptide::gradients {

/// A gradient that is not finite.
struct BadGradient {
  int unit = 0;       // Unit::index()
  int parameter = 0;  // in that unit
  /// The contributor; none: every contribution was finite, the sum was not.
  world::WorldRank rank = world::WorldRank::none;
};

/// When to look: at each sum, while its rows are at hand; or once per step, so that the host waits for the device once.
enum class FiniteCheckTime : uint8_t { each_sum, each_step };

/// Remembers the first bad gradient of a step. Units are counted by position.
class FiniteCheck {
 public:
  /// `num_ranks`: how many rows a sum has, one per rank, where each step is checked; 0: the transport has summed them.
  /// `squares`: (units,) fp64, where sums leave their squares.
  FiniteCheck(const std::vector<sharding::Unit*>& units, int64_t num_ranks, at::Tensor squares, FiniteCheckTime time);

  using Sum = std::function<at::Tensor()>;  // (shard,), called only where something is bad

  /// After a unit's rows were summed, which came by `route`. `first`: of this unit in this step.
  void note(int unit, const numerics::Contributions& rows, bool first, const Route& route, const Sum& sum);
  /// The place in a rank's own contribution, before `note`. `element`: of the unit; `row`: whose contribution is bad,
  /// of the ranks that reduce the unit; none: each is finite.
  void note_element(int unit, int64_t element, world::TeamIndex row);
  /// After a unit's sum was overwritten and its squares taken anew: no rank contributed what is bad there.
  void note_overwritten(int unit, const Sum& sum);
  using Read = std::function<at::Tensor(const at::Tensor&)>;  // to the host; may wait

  /// The sum of the squares of these units, by position, of which this rank is the first holder; non-finite if any
  /// element is. Reads the device once, by `read`; absent: at once.
  double total(const std::vector<bool>& units, const Read& read = {});
  /// After `total` was not finite: finds what `note` left open. `sum_of(unit)`: the unit's accumulated sum, fp32.
  template <typename SumOf>
  void find(const std::vector<bool>& units, SumOf sum_of) {
    const int unit = bad_ || time_ == FiniteCheckTime::each_sum ? -1 : first_bad(units);
    if (unit < 0) return;
    const at::Tensor sum = sum_of(unit);
    name(unit, numerics::find_non_finite({sum}, sum), first_bad_row(unit));
  }

  const std::optional<BadGradient>& bad() const { return bad_; }
  void clear() { bad_.reset(); }

 private:
  int first_bad(const std::vector<bool>& units) const;
  world::TeamIndex first_bad_row(int unit) const;
  const double* seen(int unit) const;
  void name(int unit, const std::optional<numerics::NonFinite>& found, world::TeamIndex row);
  void name_element(int unit, int64_t element, world::TeamIndex row);

  std::vector<sharding::Unit*> units_;
  int64_t num_ranks_;
  at::Tensor squares_;
  FiniteCheckTime time_;
  /// (units, ranks) fp32, each row's largest magnitude in this step; of several ranks, where the check is late.
  at::Tensor maxima_;
  at::Tensor seen_;  // (units, 1 + ranks) fp64 on the host: squares and maxima as `total` read them
  std::optional<BadGradient> bad_;
};

}  // namespace deeptide::gradients
