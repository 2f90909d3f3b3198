// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The five schedules, one small class each. The table in src/config has checked their parameters and filled defaults.
#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <variant>

#include "base/log.h"

namespace deeptide::optim {
namespace {

using Groups = std::vector<Hyperparameters>;

class LRRangeTest final : public Schedule {
 public:
  explicit LRRangeTest(const LRRangeTestConfig& config)
      : min_lr_(config.min_lr),
        step_size_(static_cast<double>(config.step_size)),
        step_rate_(config.step_rate),
        staircase_(config.staircase) {}

  void apply(int64_t iteration, const Groups&, Groups& groups) const override {
    double interval = static_cast<double>(iteration + 1) / step_size_;
    if (staircase_) interval = std::floor(interval);
    for (auto& group : groups) group.set("lr", min_lr_ * (1 + step_rate_ * interval));
  }

 private:
  double min_lr_, step_size_, step_rate_;
  bool staircase_;
};

class OneCycle final : public Schedule {
 public:
  explicit OneCycle(const OneCycleConfig& config)
      : config_(config),
        first_(static_cast<double>(config.first_step_size)),
        second_(static_cast<double>(config.second_step_size)) {}

  void apply(int64_t iteration, const Groups&, Groups& groups) const override {
    const double batch = static_cast<double>(iteration + 1);
    double lr = config_.min_lr, momentum = config_.max_momentum;
    if (iteration < 0) {
      momentum = config_.min_momentum;  // as DeepSpeed's constructor sets it, though the cycle starts at the maximum
    } else if (batch < first_ + second_) {
      const double scale = cycle_scale(batch);
      lr = config_.min_lr + (config_.max_lr - config_.min_lr) * scale;
      momentum = config_.max_momentum - (config_.max_momentum - config_.min_momentum) * scale;
    } else if (config_.decay_step_size > 0) {
      const double interval = (batch - first_ - second_) / static_cast<double>(config_.decay_step_size);
      lr = config_.min_lr / (1 + config_.decay_lr_rate * interval);
      momentum = config_.max_momentum * (1 + config_.decay_momentum_rate * interval);
    }
    for (auto& group : groups) {
      group.set("lr", lr);
      // Muon's momentum is none of Adam's: DeepSpeed leaves that optimizer's groups alone, and so does this.
      const bool cycles = config_.cycle_momentum && group.has("beta1") && !group.has("use_muon");
      if (cycles) group.set("beta1", momentum).set("beta2", 0.99);
    }
  }

 private:
  /// 0 at the cycle's ends, 1 at its peak.
  double cycle_scale(double batch) const {
    const bool rising = batch <= first_;
    const double scale = rising ? batch / first_ : (first_ + second_ - batch) / second_;
    const auto stairs = static_cast<double>(rising ? config_.first_stair_count : config_.second_stair_count);
    return stairs > 0 ? std::floor(scale * stairs) / stairs : scale;
  }

  OneCycleConfig config_;
  double first_, second_;  // steps of the rise and of the fall
};

/// The rise shared by the three warm-up schedules: 0 at iteration 0, 1 from iteration num_steps on.
class Warmup {
 public:
  Warmup(int64_t num_steps, WarmupShape shape)
      : num_steps_(std::max(2.0, static_cast<double>(num_steps))), shape_(shape) {}

  double num_steps() const { return num_steps_; }
  bool ended(int64_t iteration) const { return static_cast<double>(iteration) >= num_steps_; }

  double fraction(int64_t iteration) const {
    const double at = static_cast<double>(iteration);
    if (ended(iteration)) return 1.0;
    return shape_ == WarmupShape::log ? std::log(at + 1) / std::log(num_steps_) : at / num_steps_;
  }

 private:
  double num_steps_;
  WarmupShape shape_;
};

/// The schedule's total, with a warning when it ends before the warm-up does.
double checked_total(int64_t total_steps, const Warmup& warmup, std::string_view type) {
  const auto total = static_cast<double>(total_steps);
  if (total < warmup.num_steps()) {
    log(LogLevel::warning,
        std::string(type) + ": total_num_steps is less than warmup_num_steps, so the warm-up never ends");
  }
  return total;
}

class WarmupLR : public Schedule {
 public:
  /// `max_lr`: absent, each group rises to its own lr.
  WarmupLR(const Warmup& warmup, double min_lr, std::optional<double> max_lr)
      : warmup_(warmup), min_lr_(min_lr), max_lr_(max_lr) {}

  void apply(int64_t iteration, const Groups& base, Groups& groups) const override {
    const double rise = iteration < 0 ? 0.0 : fraction(iteration);
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i].set("lr", min_lr_ + (max_lr_.value_or(base[i].lr()) - min_lr_) * rise);
    }
  }

 protected:
  virtual double fraction(int64_t iteration) const { return warmup_.fraction(iteration); }

  Warmup warmup_;

 private:
  double min_lr_;
  std::optional<double> max_lr_;
};

class WarmupDecayLR final : public WarmupLR {
 public:
  explicit WarmupDecayLR(const WarmupDecayLRConfig& config)
      : WarmupLR({config.num_steps, config.shape}, config.min_lr, config.max_lr),
        total_(checked_total(config.total_steps, warmup_, config.kType)) {}

 protected:
  double fraction(int64_t iteration) const override {
    if (!warmup_.ended(iteration)) return warmup_.fraction(iteration);
    const double left = total_ - static_cast<double>(iteration);
    return std::max(0.0, left / std::max(1.0, total_ - warmup_.num_steps()));
  }

 private:
  double total_;
};

class WarmupCosineLR final : public Schedule {
 public:
  explicit WarmupCosineLR(const WarmupCosineLRConfig& config)
      : warmup_(config.num_steps, config.shape),
        total_(checked_total(config.total_steps, warmup_, config.kType)),
        warmup_min_(config.min_ratio),
        cos_min_(config.cos_min_ratio) {}

  void apply(int64_t iteration, const Groups& base, Groups& groups) const override {
    const double factor = iteration < 0 ? 0.0 : ratio(iteration);
    for (size_t i = 0; i < groups.size(); ++i) groups[i].set("lr", base[i].lr() * factor);
  }

 private:
  double ratio(int64_t iteration) const {
    if (!warmup_.ended(iteration)) return warmup_min_ + (1 - warmup_min_) * warmup_.fraction(iteration);
    const double done = static_cast<double>(iteration) - warmup_.num_steps() + 1;
    const double progress = std::min(1.0, done / std::max(1.0, total_ - warmup_.num_steps()));
    const double cosine = (1 + std::cos(M_PI * progress)) / 2;
    return std::max(0.0, cos_min_ + (1 - cos_min_) * cosine);
  }

  Warmup warmup_;
  double total_, warmup_min_, cos_min_;
};

std::unique_ptr<Schedule> make(const std::monostate&) { return nullptr; }

std::unique_ptr<Schedule> make(const LRRangeTestConfig& config) { return std::make_unique<LRRangeTest>(config); }

std::unique_ptr<Schedule> make(const OneCycleConfig& config) { return std::make_unique<OneCycle>(config); }

std::unique_ptr<Schedule> make(const WarmupLRConfig& config) {
  return std::make_unique<WarmupLR>(Warmup(config.num_steps, config.shape), config.min_lr, config.max_lr);
}

std::unique_ptr<Schedule> make(const WarmupDecayLRConfig& config) { return std::make_unique<WarmupDecayLR>(config); }

std::unique_ptr<Schedule> make(const WarmupCosineLRConfig& config) { return std::make_unique<WarmupCosineLR>(config); }

}  // namespace

std::optional<SchedulePeak> peak_of(const SchedulerConfig& config) {
  if (const auto* cycle = std::get_if<OneCycleConfig>(&config)) return SchedulePeak{"cycle_max_lr", cycle->max_lr};
  if (const auto* decay = std::get_if<WarmupDecayLRConfig>(&config)) {
    return SchedulePeak{"warmup_max_lr", decay->max_lr};
  }
  const auto* warmup = std::get_if<WarmupLRConfig>(&config);
  if (!warmup || !warmup->max_lr) return std::nullopt;
  return SchedulePeak{"warmup_max_lr", *warmup->max_lr};
}

std::unique_ptr<Schedule> make_schedule(const SchedulerConfig& config) {
  return std::visit([](const auto& chosen) { return make(chosen); }, config);
}

}  // namespace deeptide::optim
