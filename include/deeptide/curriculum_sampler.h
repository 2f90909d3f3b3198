// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Samples in the order of their difficulty: which ones a rank sees, step by step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deeptide/curriculum.h"

namespace deeptide {

/// Draws each step's samples from those that the curriculum's metrics have reached, as DeepSpeedDataSampler does: when
/// a difficulty grows, the samples that it adds become a cluster; a step draws from clusters by their sizes. Draws
/// equal DeepSpeed 0.19.8's for the same seed. Every rank draws the same by itself: nothing is communicated or written.
/// Keeps 4 bytes per sample that was reached.
class DEEPTIDE_API CurriculumSampler {
 public:
  struct Options {
    int64_t micro_batch = 1;
    int64_t accumulation = 1;
    int rank = 0;
    int world_size = 1;
    bool drop_last = true;
  };
  /// Steps drawn so far, samples of the last one already dealt to all ranks, and those dealt altogether.
  struct Position {
    int64_t step = 0;
    int64_t offset = 0;
    int64_t consumed = 0;
  };

  /// Reads "data_efficiency". Errors: ConfigError naming the key, or the index file that does not fit `num_samples`.
  CurriculumSampler(const Config& config, int64_t num_samples, const Options& options);
  /// `section`: JSON with that section's keys.
  CurriculumSampler(std::string_view section, int64_t num_samples, const Options& options);
  ~CurriculumSampler();
  CurriculumSampler(CurriculumSampler&&) noexcept;

  /// This rank's next micro-batch; nothing once num_epochs times the data is dealt.
  /// Errors: ConfigError where the first difficulty has no samples, or the last has too few for a batch.
  std::optional<std::vector<int64_t>> next();
  /// num_epochs * num_samples.
  int64_t total_samples() const;
  Position position() const;
  /// The state of this or an earlier position, as JSON: what was drawn when, and not the samples themselves.
  std::string state(const Position& position) const;
  /// Draws again what was drawn up to the state, with the batch sizes of then; goes on with those of now.
  /// Errors: ConfigError, with nothing changed, for a state of another seed, data set or metrics.
  void load_state(const std::string& state);
  /// The function of a metric whose schedule is "custom". Errors: ConfigError for a metric that is not there.
  void set_function(const std::string& metric, CurriculumSchedule::Function function);
  /// The difficulties of the last step by metric; empty before the first.
  std::map<std::string, int64_t> difficulties() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deeptide
