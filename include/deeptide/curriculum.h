// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules of what a step leaves out: the difficulty of its samples, its tokens, its layers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide {

/// How difficult the samples of a step may be. Steps count from 1, as DeepSpeed 0.19.8's do.
/// Source: Curriculum Learning, Li et al., arXiv:2108.06084.
class DEEPTIDE_API CurriculumSchedule {
 public:
  /// A difficulty from a step; a program's own schedule.
  using Function = std::function<int64_t(int64_t step)>;

  /// Reads the section "curriculum_learning", on or off. Errors: ConfigError naming the key.
  static CurriculumSchedule from_config(const Config& config);
  /// `section`: JSON with the keys of that section, or of an entry of "curriculum_metrics"; `origin`: its name in
  /// errors. Errors: ConfigError naming the key.
  static CurriculumSchedule from_text(std::string_view section, std::string_view origin = "curriculum_learning");

  /// The schedule's value at `step`: for fixed_linear and fixed_root, min + (step / total)^(1 / degree) * (max - min),
  /// cut to a multiple of difficulty_step that is at least min and at most max.
  /// Errors: ConfigError for a schedule "custom" without a function.
  int64_t at(int64_t step) const;
  /// Moves to `step` and returns its difficulty. Once the maximum is reached, it stays.
  int64_t update(int64_t step);

  int64_t current() const { return current_; }
  void set_current(int64_t difficulty) { current_ = difficulty; }
  int64_t min_difficulty() const { return min_; }
  int64_t max_difficulty() const { return max_; }
  bool is_custom() const { return type_ == Type::custom; }
  /// The function of a schedule "custom". Errors: ConfigError for another schedule, where it would have no effect.
  void set_function(Function function);

 private:
  enum class Type : uint8_t { fixed_root, fixed_discrete, custom };

  Type type_ = Type::fixed_root;
  int64_t min_ = 0, max_ = 0, current_ = 0;
  int64_t total_steps_ = 1, multiple_ = 1;
  double degree_ = 1.0;
  std::vector<int64_t> difficulties_, last_steps_;
  Function function_;
};

/// How many tokens the layers of random-LTD keep, and how many tokens of layers were computed.
/// Source: Random-LTD, Yao et al., arXiv:2211.11586.
class DEEPTIDE_API RandomLtdSchedule {
 public:
  struct Numbers {
    int64_t total_layers = 0;
    int64_t dropping_layers = 0;
    int64_t min_length = 0;
    int64_t max_length = 0;
    int64_t steps = 1;     // of the growth
    int64_t multiple = 1;  // lengths are multiples of it
    int64_t global_batch = 1;
  };
  struct Position {
    int64_t step = -1;
    int64_t length = 0;
    int64_t layer_tokens = 0;
  };

  /// Errors: ConfigError naming the number that is out of range.
  explicit RandomLtdSchedule(const Numbers& numbers);
  /// Reads "data_efficiency.data_routing.random_ltd". Errors: ConfigError if it is off, or lacks a key.
  static RandomLtdSchedule from_config(const Config& config, int64_t global_batch);

  int64_t at(int64_t step) const;
  /// Moves to `step`, counting from 0, and returns its number of tokens; a step counts its tokens once.
  int64_t update(int64_t step);
  /// The tokens that `update` of steps 0 to `steps` - 1 would count from here; changes nothing.
  int64_t layer_tokens_after(int64_t steps) const;
  const Numbers& numbers() const { return numbers_; }
  Position position() const { return position_; }
  void set_position(Position position) { position_ = position; }
  /// Returns the client state with the position in it, to be saved. Python's engine reads it, too.
  std::string add_state(const std::string& client_state_json) const;
  /// Goes on where a saved client state was; false if it has no position. Errors: ConfigError if it cannot be read.
  bool take_state(const std::string& client_state_json);

 private:
  Numbers numbers_;
  Position position_;
};

/// The share of layers that progressive layer drop keeps: (1 - theta) * exp(-gamma * step) + theta.
/// Source: Zhang and He, arXiv:2010.13369.
class DEEPTIDE_API ProgressiveLayerDrop {
 public:
  /// Errors: ConfigError for theta outside [0, 1] or a negative gamma.
  explicit ProgressiveLayerDrop(double theta = 0.5, double gamma = 0.001);
  static ProgressiveLayerDrop from_config(const Config& config);

  /// Takes the share of `step`, which counts from 0. 1 before the first call.
  void update(int64_t step);
  double current() const { return current_; }
  void set_current(double share) { current_ = share; }
  double theta() const { return theta_; }
  double gamma() const { return gamma_; }
  /// The probability with which layer `layer` of `num_layers` runs, the first being 0: 1 - layer / num_layers *
  /// (1 - share).
  static double keep_probability(int64_t layer, int64_t num_layers, double share);
  /// Draws, by torch's generator of the CPU, whether this forward leaves a layer out: its input then stands for its
  /// output. Ask while training. A layer that is certain to run draws nothing.
  bool drops(int64_t layer, int64_t num_layers) const;
  /// The share in a client state, by the rules of RandomLtdSchedule.
  std::string add_state(const std::string& client_state_json) const;
  bool take_state(const std::string& client_state_json);

 private:
  double theta_, gamma_, current_ = 1.0;
};

}  // namespace deeptide
