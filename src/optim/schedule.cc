// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The five schedules, one small class each, and the reading of their parameters.
#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string>

#include "base/log.h"
#include "deeptide/errors.h"

namespace deeptide::optim {
namespace {

using Groups = std::vector<Hyperparameters>;

/// Hands out a section's parameters by name and, at the end, names what nobody asked for.
class Parameters {
 public:
  explicit Parameters(const SchedulerConfig& config) : config_(config) {}

  std::optional<double> find(const std::string& key) {
    known_.insert(key);
    const auto at = config_.params.find(key);
    if (at == config_.params.end()) return std::nullopt;
    if (!std::isfinite(at->second)) fail(key, "a finite number", std::to_string(at->second));
    return at->second;
  }

  double number(const std::string& key, double absent) { return find(key).value_or(absent); }

  double required(const std::string& key) {
    const auto value = find(key);
    if (!value) fail(key, "a number: " + config_.type + " has no default for it", "nothing");
    return *value;
  }

  double at_least(const std::string& key, double value, double least) const {
    if (value < least) fail(key, "a number not below " + text(least), text(value));
    return value;
  }

  double positive(const std::string& key, double value) const {
    if (value <= 0) fail(key, "a positive number", text(value));
    return value;
  }

  /// A whole number of steps, 1 or more.
  double steps(const std::string& key, double value) const {
    if (value < 1 || value != std::floor(value)) fail(key, "a positive whole number of steps", text(value));
    return value;
  }

  std::string word(const std::string& key, const std::string& absent, const std::set<std::string>& allowed) {
    known_.insert(key);
    const auto at = config_.names.find(key);
    const std::string value = at == config_.names.end() ? absent : at->second;
    if (!allowed.contains(value)) fail(key, "one of " + list(allowed), "\"" + value + "\"");
    return value;
  }

  void finish() const {
    for (const auto& [key, value] : config_.params) check_known(key);
    for (const auto& [key, value] : config_.names) check_known(key);
  }

 private:
  static std::string text(double value) {
    std::string digits = std::to_string(value);
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.back() == '.') digits.pop_back();
    return digits;
  }

  static std::string list(const std::set<std::string>& words) {
    std::string joined;
    for (const auto& word : words) joined += (joined.empty() ? "" : ", ") + word;
    return joined;
  }

  void check_known(const std::string& key) const {
    if (!known_.contains(key)) fail(key, "one of " + config_.type + "'s parameters: " + list(known_), "this key");
  }

  [[noreturn]] void fail(const std::string& key, const std::string& expected, const std::string& got) const {
    throw ConfigError("scheduler.params." + key + ": got " + got + ", expected " + expected);
  }

  const SchedulerConfig& config_;
  std::set<std::string> known_;
};

class LRRangeTest final : public Schedule {
 public:
  explicit LRRangeTest(Parameters& read)
      : min_lr_(read.at_least("lr_range_test_min_lr", read.number("lr_range_test_min_lr", 1e-3), 0)),
        step_size_(read.steps("lr_range_test_step_size", read.number("lr_range_test_step_size", 2000))),
        step_rate_(read.number("lr_range_test_step_rate", 1.0)),
        staircase_(read.number("lr_range_test_staircase", 0) != 0) {}

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
  explicit OneCycle(Parameters& read)
      : min_lr_(read.required("cycle_min_lr")),
        max_lr_(read.required("cycle_max_lr")),
        decay_lr_rate_(read.number("decay_lr_rate", 0)),
        first_(read.positive("cycle_first_step_size", read.number("cycle_first_step_size", 2000))),
        second_(read.at_least("cycle_second_step_size", read.number("cycle_second_step_size", first_), 0)),
        first_stairs_(read.at_least("cycle_first_stair_count", read.number("cycle_first_stair_count", 0), 0)),
        second_stairs_(
            read.at_least("cycle_second_stair_count", read.number("cycle_second_stair_count", first_stairs_), 0)),
        decay_step_size_(read.at_least("decay_step_size", read.number("decay_step_size", 0), 0)),
        cycle_momentum_(read.number("cycle_momentum", 1) != 0),
        min_mom_(read.number("cycle_min_mom", 0.8)),
        max_mom_(read.number("cycle_max_mom", 0.9)),
        decay_mom_rate_(read.number("decay_mom_rate", 0)) {}

  void apply(int64_t iteration, const Groups&, Groups& groups) const override {
    const double batch = static_cast<double>(iteration + 1);
    double lr = min_lr_, momentum = max_mom_;
    if (iteration < 0) {
      momentum = min_mom_;  // what construction sets, though the cycle's first value is the maximum
    } else if (batch < first_ + second_) {
      const double scale = cycle_scale(batch);
      lr = min_lr_ + (max_lr_ - min_lr_) * scale;
      momentum = max_mom_ - (max_mom_ - min_mom_) * scale;
    } else if (decay_step_size_ > 0) {
      const double interval = (batch - first_ - second_) / decay_step_size_;
      lr = min_lr_ / (1 + decay_lr_rate_ * interval);
      momentum = max_mom_ * (1 + decay_mom_rate_ * interval);
    }
    for (auto& group : groups) {
      group.set("lr", lr);
      if (cycle_momentum_ && group.has("beta1")) group.set("beta1", momentum).set("beta2", 0.99);
    }
  }

 private:
  /// 0 at the cycle's ends, 1 at its peak.
  double cycle_scale(double batch) const {
    const bool rising = batch <= first_;
    const double scale = rising ? batch / first_ : (first_ + second_ - batch) / second_;
    const double stairs = rising ? first_stairs_ : second_stairs_;
    return stairs > 0 ? std::floor(scale * stairs) / stairs : scale;
  }

  double min_lr_, max_lr_, decay_lr_rate_;
  double first_, second_, first_stairs_, second_stairs_, decay_step_size_;
  bool cycle_momentum_;
  double min_mom_, max_mom_, decay_mom_rate_;
};

/// The rise shared by the three warm-up schedules: 0 at iteration 0, 1 from iteration num_steps on.
class Warmup {
 public:
  explicit Warmup(Parameters& read)
      : num_steps_(std::max(2.0, read.steps("warmup_num_steps", read.number("warmup_num_steps", 1000)))),
        logarithmic_(read.word("warmup_type", "log", {"log", "linear"}) == "log") {}

  double num_steps() const { return num_steps_; }
  bool ended(int64_t iteration) const { return static_cast<double>(iteration) >= num_steps_; }

  double fraction(int64_t iteration) const {
    const double at = static_cast<double>(iteration);
    if (ended(iteration)) return 1.0;
    return logarithmic_ ? std::log(at + 1) / std::log(num_steps_) : at / num_steps_;
  }

 private:
  double num_steps_;
  bool logarithmic_;
};

double read_total_steps(Parameters& read, const Warmup& warmup, const std::string& type) {
  const double total = read.steps("total_num_steps", read.required("total_num_steps"));
  if (total < warmup.num_steps()) {
    log(LogLevel::warning, type + ": total_num_steps is less than warmup_num_steps, the warm-up never ends");
  }
  return total;
}

class WarmupLR : public Schedule {
 public:
  /// `absent_max_lr`: none means each group's own lr.
  WarmupLR(Parameters& read, std::optional<double> absent_max_lr)
      : warmup_(read), min_lr_(read.number("warmup_min_lr", 0)), max_lr_(read.find("warmup_max_lr")) {
    if (!max_lr_) max_lr_ = absent_max_lr;
  }

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
  explicit WarmupDecayLR(Parameters& read)
      : WarmupLR(read, 0.001), total_(read_total_steps(read, warmup_, "WarmupDecayLR")) {}

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
  explicit WarmupCosineLR(Parameters& read)
      : warmup_(read),
        total_(read_total_steps(read, warmup_, "WarmupCosineLR")),
        warmup_min_(read.number("warmup_min_ratio", 0.0)),
        cos_min_(read.number("cos_min_ratio", 1e-4)) {}

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

std::unique_ptr<Schedule> make_named(const std::string& type, Parameters& read) {
  if (type == "LRRangeTest") return std::make_unique<LRRangeTest>(read);
  if (type == "OneCycle") return std::make_unique<OneCycle>(read);
  if (type == "WarmupLR") return std::make_unique<WarmupLR>(read, std::nullopt);
  if (type == "WarmupDecayLR") return std::make_unique<WarmupDecayLR>(read);
  if (type == "WarmupCosineLR") return std::make_unique<WarmupCosineLR>(read);
  throw ConfigError("scheduler.type: got \"" + type +
                    "\", expected LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR");
}

}  // namespace

std::unique_ptr<Schedule> make_schedule(const SchedulerConfig& config) {
  if (config.type.empty()) return nullptr;
  Parameters read(config);
  auto schedule = make_named(config.type, read);
  read.finish();
  return schedule;
}

}  // namespace deeptide::optim
