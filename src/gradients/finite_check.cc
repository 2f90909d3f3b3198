// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A sum of squares is not finite exactly when some element is not, or when it overflows.
#include "gradients/finite_check.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace deeptide::gradients {

using at::Tensor;
using numerics::Contributions;
using sharding::Unit;
using world::TeamIndex;

FiniteCheck::FiniteCheck(const std::vector<Unit*>& units, int64_t num_ranks, Tensor squares, FiniteCheckTime time)
    : units_(units), num_ranks_(num_ranks), squares_(std::move(squares)), time_(time) {
  if (time_ == FiniteCheckTime::each_sum || num_ranks_ <= 1) return;  // one rank's sums tell whose gradient is bad
  maxima_ = at::zeros({static_cast<int64_t>(units_.size()), num_ranks}, squares_.options().dtype(at::kFloat));
}

void FiniteCheck::note(int unit, const Contributions& rows, bool first, const Route& route, const Sum& sum) {
  if (time_ == FiniteCheckTime::each_sum) {
    if (bad_ || std::isfinite(squares_[unit].item<double>())) return;
    const auto found = numerics::find_non_finite(rows.rows, sum());
    name(unit, found, found && found->rank >= 0 ? route.sender(found->rank) : TeamIndex::none);
    return;
  }
  constexpr double kLargest = std::numeric_limits<double>::infinity();  // the norm that is the largest magnitude
  for (int64_t row = 0; maxima_.defined() && row < static_cast<int64_t>(rows.rows.size()); ++row) {
    Tensor maximum = maxima_[unit][row];
    const Tensor own = at::linalg_vector_norm(rows.rows[static_cast<size_t>(row)], kLargest, at::OptionalIntArrayRef{},
                                              false, at::kFloat);
    maximum.copy_(first ? own : at::maximum(maximum, own));
  }
}

void FiniteCheck::note_element(int unit, int64_t element, TeamIndex row) {
  if (!bad_) name_element(unit, element, row);
}

void FiniteCheck::note_overwritten(int unit, const Sum& sum) {
  if (bad_ && bad_->unit == units_[unit]->index()) bad_.reset();
  if (maxima_.defined()) maxima_[unit].zero_();
  if (bad_ || std::isfinite(squares_[unit].item<double>())) return;
  const Tensor whole = sum();
  name(unit, numerics::find_non_finite({whole}, whole), TeamIndex::none);
}

double FiniteCheck::total(const std::vector<bool>& units, const Read& read) {
  const Tensor squares = squares_.unsqueeze(1);
  const Tensor figures = maxima_.defined() ? at::cat({squares, maxima_.to(at::kDouble)}, 1) : squares;
  seen_ = read ? read(figures) : figures.cpu();
  double total = 0.0;
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i] && units_[i]->is_first_holder()) total += seen(static_cast<int>(i))[0];
  }
  return total;
}

int FiniteCheck::first_bad(const std::vector<bool>& units) const {
  for (size_t i = units.size(); i-- > 0;) {  // the order in which backward reaches them
    if (units[i] && !std::isfinite(seen(static_cast<int>(i))[0])) return static_cast<int>(i);
  }
  return -1;
}

TeamIndex FiniteCheck::first_bad_row(int unit) const {
  if (num_ranks_ == 1) return TeamIndex(0);
  for (int row = 0; row + 1 < seen_.size(1); ++row) {
    if (!std::isfinite(seen(unit)[row + 1])) return TeamIndex(row);
  }
  return TeamIndex::none;
}

const double* FiniteCheck::seen(int unit) const { return seen_.const_data_ptr<double>() + unit * seen_.size(1); }

void FiniteCheck::name(int unit, const std::optional<numerics::NonFinite>& found, TeamIndex row) {
  if (!found) return;  // finite squares overflowed: the step is skipped without a culprit
  name_element(unit, units_[unit]->shard_begin() + found->index, row);
}

/// Here, and nowhere else, the row of a reduction becomes a rank of the job.
void FiniteCheck::name_element(int unit, int64_t element, TeamIndex row) {
  const Unit& u = *units_[unit];
  bad_ = BadGradient{.unit = u.index(), .parameter = 0, .rank = u.reduce_over().world_rank(row)};
  for (size_t i = 0; i < u.parameters().size(); ++i) {
    if (element >= u.parameters()[i].offset) bad_->parameter = static_cast<int>(i);
  }
}

}  // namespace deeptide::gradients
