// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A sum of squares is not finite exactly when some element is not, or when it overflows.
#include "gradients/finite_check.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace deeptide::gradients {

using at::Tensor;
using numerics::Contributions;
using sharding::Unit;

FiniteCheck::FiniteCheck(const std::vector<Unit*>& units, int64_t num_ranks, Tensor squares, FiniteCheckTime time)
    : units_(units), num_ranks_(num_ranks), squares_(std::move(squares)), time_(time) {
  if (time_ == FiniteCheckTime::each_sum) return;
  maxima_ = at::zeros({static_cast<int64_t>(units_.size()), num_ranks}, squares_.options().dtype(at::kFloat));
}

void FiniteCheck::note(int unit, const Contributions& rows, const Tensor& sum, bool first) {
  if (time_ == FiniteCheckTime::each_sum) {
    if (bad_ || std::isfinite(squares_[unit].item<double>())) return;
    const auto found = numerics::find_non_finite(rows.rows, sum.defined() ? sum : rows.sum());
    name(unit, found, found && num_ranks_ > 0 ? found->rank : -1);
    return;
  }
  constexpr double kLargest = std::numeric_limits<double>::infinity();  // the norm that is the largest magnitude
  for (int64_t row = 0; row < num_ranks_; ++row) {
    Tensor maximum = maxima_[unit][row];
    const Tensor own = at::linalg_vector_norm(rows.rows[static_cast<size_t>(row)], kLargest, at::OptionalIntArrayRef{},
                                              false, at::kFloat);
    maximum.copy_(first ? own : at::maximum(maximum, own));
  }
}

void FiniteCheck::note_overwritten(int unit, const Tensor& sum) {
  if (bad_ && bad_->unit == units_[unit]->index()) bad_.reset();
  if (maxima_.defined()) maxima_[unit].zero_();
  if (!bad_ && !std::isfinite(squares_[unit].item<double>())) name(unit, numerics::find_non_finite({sum}, sum), -1);
}

double FiniteCheck::total(const std::vector<bool>& units) const {
  const Tensor squares = squares_.cpu();
  double total = 0.0;
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i]) total += squares.const_data_ptr<double>()[i];
  }
  return total;
}

int FiniteCheck::first_bad(const std::vector<bool>& units) const {
  const Tensor squares = squares_.cpu();
  for (size_t i = units.size(); i-- > 0;) {  // the order in which backward reaches them
    if (units[i] && !std::isfinite(squares.const_data_ptr<double>()[i])) return static_cast<int>(i);
  }
  return -1;
}

int FiniteCheck::first_bad_row(int unit) const {
  const Tensor maxima = maxima_[unit].cpu();
  for (int64_t row = 0; row < maxima.numel(); ++row) {
    if (!std::isfinite(maxima.const_data_ptr<float>()[row])) return static_cast<int>(row);
  }
  return -1;
}

void FiniteCheck::name(int unit, const std::optional<numerics::NonFinite>& found, int rank) {
  if (!found) return;  // finite squares overflowed: the step is skipped without a culprit
  const Unit& u = *units_[unit];
  const int64_t element = u.shard_begin() + found->index;
  bad_ = BadGradient{.unit = u.index(), .parameter = 0, .rank = rank};
  for (size_t i = 0; i < u.parameters().size(); ++i) {
    if (element >= u.parameters()[i].offset) bad_->parameter = static_cast<int>(i);
  }
}

}  // namespace deeptide::gradients
