// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes and puts buffers as ShardedOptimizer does, without their memory.
#include "zero/steps/step_forecast.h"

#include <algorithm>
#include <deque>

#include "device/memory/memory.h"
#include "zero/transfers/unit_gathers.h"

namespace deeptide::zero {

namespace {

constexpr int64_t kSumBytes = sizeof(float);
constexpr int64_t kDirectionBytes = 2;  // bf16

/// The pool of one ShardedOptimizer and its queue of gathers.
class ForecastStep {
 public:
  ForecastStep(const std::vector<UnitForecast>& units, bool gathers_gradients)
      : units_(units), gathers_gradients_(gathers_gradients) {}

  /// `has_matrices`: by unit.
  void by_rule(const std::vector<bool>& has_matrices) {
    size_t next = 0;
    for (size_t i = 0; i < units_.size(); ++i) {
      for (; gathers_gradients_ && next < units_.size() && (next <= i || under_way_ < kBytesUnderWay); ++next) {
        const int64_t bytes = units_[next].whole_numel * kSumBytes;
        gathers_.push_back(pool_.take(bytes));
        under_way_ += bytes;
      }
      if (gathers_gradients_) under_way_ -= units_[i].whole_numel * kSumBytes;
      if (has_matrices[i]) exchange_matrices(units_[i]);
      if (!gathers_gradients_) continue;
      pool_.put(gathers_.front());
      gathers_.pop_front();
    }
  }
  void by_signs() {
    for (const UnitForecast& unit : units_) pool_.put(pool_.take(unit.whole_numel * kSumBytes));
  }
  void by_caller() {
    if (!gathers_gradients_) return;  // sums are no buffers of the pool
    std::vector<int64_t> taken;
    for (const UnitForecast& unit : units_) taken.push_back(pool_.take(unit.whole_numel * kSumBytes));
    for (const int64_t bytes : taken) pool_.put(bytes);
  }
  int64_t peak() const { return pool_.peak(); }

 private:
  void exchange_matrices(const UnitForecast& unit) {
    int64_t taken = pool_.take(unit.numel * kDirectionBytes);
    if (unit.numel != unit.whole_numel) {
      const int64_t whole = pool_.take(unit.whole_numel * kDirectionBytes);
      pool_.put(std::exchange(taken, whole));
    }
    if (unit.cut_over > 1) {
      const int64_t slices = pool_.take(unit.cut_over * unit.whole_numel * kDirectionBytes);
      pool_.put(std::exchange(taken, slices));
    }
    pool_.put(taken);
  }

  const std::vector<UnitForecast>& units_;
  bool gathers_gradients_;
  device::PoolForecast pool_{device::kDefaultMaxWaste};
  std::deque<int64_t> gathers_;
  int64_t under_way_ = 0;
};

}  // namespace

int64_t forecast_step(const std::vector<UnitForecast>& units, const optim::Rule& rule,
                      const std::vector<Hyperparameters>& groups, const StagePolicy& policy, int num_ranks) {
  ForecastStep step(units, !policy.shard_optimizer && num_ranks > 1);
  if (rule.is_callers()) {
    step.by_caller();
    return step.peak();
  }
  std::vector<bool> has_matrices;
  for (const UnitForecast& unit : units) {
    has_matrices.push_back(std::any_of(unit.groups.begin(), unit.groups.end(), [&](int group) {
      return rule.reach(groups.at(group)) == optim::Reach::whole_parameter;
    }));
  }
  for (int i = 0; i < 2; ++i) step.by_rule(has_matrices);  // the second step finds the first one's buffers
  if (rule.compressed()) step.by_signs();
  return step.peak();
}

}  // namespace deeptide::zero
