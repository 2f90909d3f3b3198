// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gathers and releases units as Residency does, without their memory: two passes through the model in module order.
#include <algorithm>
#include <deque>

#include "comm/messages.h"
#include "device/memory/memory.h"
#include "sharding/plan.h"
#include "sharding/residency.h"

namespace deeptide::sharding {

namespace {

std::vector<int64_t> numels_of(const std::vector<const UnitLayout*>& units) {
  std::vector<int64_t> numels;
  for (const UnitLayout* unit : units) numels.push_back(unit->numel);
  return numels;
}

/// One of ranks that run alike: all that one asks for is granted.
class ForecastResidency {
 public:
  ForecastResidency(const std::vector<const UnitLayout*>& units, const ResidencyLimits& limits)
      : units_(units),
        limits_(limits),
        plan_(numels_of(units), /*backward=*/true),
        states_(units.size()),
        gathers_(units.size()) {}

  /// `ends_step`: parameters change afterwards, so that nothing that was gathered is of use.
  void run_pass(bool ends_step = true) {
    const int num_units = static_cast<int>(units_.size());
    for (int unit = 0; unit < num_units; ++unit) acquire(unit);
    for (int unit = num_units - 1; unit >= 0; --unit) acquire(unit);
    needed_ = -1;
    if (posted_) serve();
    land_all();
    plan_.finish_pass();
    last_visited_ = -1;
    if (!ends_step) return;
    for (int unit = 0; unit < num_units; ++unit) {
      if (states_[unit].is_whole) let_go(unit);
    }
  }
  int64_t peak() const { return pool_.peak(); }
  /// By unit, so far.
  const std::vector<int64_t>& gathers() const { return gathers_; }

 private:
  struct State {
    bool is_whole = false;
    bool is_in_flight = false;
    int64_t buffer = 0;  // its bytes
    int64_t last_use = 0;
  };

  void acquire(int unit) {
    needed_ = unit;
    const bool moved = visit(unit);
    if (moved && posted_) serve();
    while (!states_[unit].is_whole) {
      if (states_[unit].is_in_flight) {
        land_front();
      } else {
        if (!posted_) ask_for({unit});
        serve();
      }
    }
    if (moved && !posted_) ask_for({});
  }

  bool visit(int unit) {
    states_[unit].last_use = ++clock_;
    if (last_visited_ == unit) return false;
    const int previous = std::exchange(last_visited_, unit);
    plan_.visit(unit);
    if (previous < 0 || limits_.max_reuse_distance >= limits_.max_live || !states_[previous].is_whole) return true;
    const auto until = plan_.elements_until(previous);
    if (!until || *until > limits_.max_reuse_distance) let_go(previous);
    return true;
  }

  /// Adds what is used next, as Residency::add_wishes.
  void ask_for(std::vector<int> asked) {
    int64_t ahead = 0, live = units_[needed_]->numel;
    for (const int unit : plan_.upcoming(comm::Wishes::kMaxUnits)) {
      if (unit == needed_) continue;
      live += units_[unit]->numel;
      if (live > limits_.max_live) break;
      if (states_[unit].is_whole || states_[unit].is_in_flight) continue;
      ahead += units_[unit]->numel;
      if (ahead > limits_.prefetch || asked.size() == comm::Wishes::kMaxUnits) break;
      asked.push_back(unit);
    }
    asked_ = std::move(asked);
    posted_ = !asked_.empty();
  }

  void serve() {
    posted_ = false;
    for (const int unit : std::exchange(asked_, {})) {
      if (states_[unit].is_whole) continue;
      if (states_[unit].is_in_flight) land_all();
      launch(unit);
    }
  }

  void launch(int unit) {
    const UnitLayout& layout = *units_[unit];
    make_room(layout.numel);
    ++gathers_[unit];
    states_[unit].buffer = pool_.take(layout.numel * static_cast<int64_t>(c10::elementSize(layout.dtype)));
    states_[unit].is_in_flight = true;
    live_numel_ += layout.numel;
    flights_.push_back(unit);
  }

  void make_room(int64_t numel) {
    while (live_numel_ + numel > limits_.max_live) {
      if (const int victim = choose_victim(); victim >= 0) {
        let_go(victim);
      } else if (!flights_.empty()) {
        land_all();
      } else {
        return;
      }
    }
  }

  int choose_victim() const {
    int victim = -1;
    std::pair<int64_t, int64_t> highest;
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
      if (!states_[unit].is_whole || unit == needed_) continue;
      const auto rank = std::make_pair(plan_.distance(unit).value_or(INT64_MAX), -states_[unit].last_use);
      if (victim >= 0 && rank <= highest) continue;
      victim = unit;
      highest = rank;
    }
    return victim;
  }

  void land_front() {
    State& state = states_[flights_.front()];
    state.is_whole = true;
    state.is_in_flight = false;
    flights_.pop_front();
  }
  void land_all() {
    while (!flights_.empty()) land_front();
  }

  void let_go(int unit) {
    live_numel_ -= units_[unit]->numel;
    states_[unit].is_whole = false;
    pool_.put(states_[unit].buffer);
  }

  const std::vector<const UnitLayout*>& units_;
  ResidencyLimits limits_;
  Plan plan_;
  std::vector<State> states_;
  std::vector<int64_t> gathers_;
  std::deque<int> flights_;
  std::vector<int> asked_;
  bool posted_ = false;
  int needed_ = -1;
  int last_visited_ = -1;
  int64_t clock_ = 0;
  int64_t live_numel_ = 0;
  device::PoolForecast pool_{kGatheredWaste};
};

}  // namespace

int64_t forecast(const std::vector<const UnitLayout*>& units, ResidencyLimits limits) {
  const int64_t least = two_largest(units);
  limits.max_live = std::max(limits.max_live, least);
  ForecastResidency residency(units, limits);
  for (int pass = 0; pass < 2; ++pass) residency.run_pass();
  int64_t item = 0;
  for (const UnitLayout* unit : units) item = std::max(item, static_cast<int64_t>(c10::elementSize(unit->dtype)));
  // An operator that uses parts of two units may find the largest ones side by side.
  return std::max(residency.peak(), least * item);
}

std::vector<int64_t> forecast_gathers(const std::vector<const UnitLayout*>& units, ResidencyLimits limits,
                                      int64_t passes) {
  limits.max_live = std::max(limits.max_live, two_largest(units));
  ForecastResidency residency(units, limits);
  residency.run_pass();  // learns the order
  const auto before = residency.gathers();
  residency.run_pass(/*ends_step=*/false);
  const auto first = residency.gathers();
  residency.run_pass();
  std::vector<int64_t> gathers;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const int64_t later = residency.gathers()[unit] - first[unit];  // of every pass that finds what the one before left
    gathers.push_back(first[unit] - before[unit] + (passes - 1) * later);
  }
  return gathers;
}

}  // namespace deeptide::sharding
