// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How far training is: only this file writes, reads and restores the counters and scalars of state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "deeptide/config.h"
#include "optim/loss_scale.h"

namespace deeptide::engine {

inline constexpr double kNoLoss = std::numeric_limits<double>::quiet_NaN();

/// Part of every checkpoint, equal on all ranks.
struct Progress {
  int64_t global_steps = 0;    // applied and skipped
  int64_t global_samples = 0;  // that these steps took, whatever the batch was at each
  int64_t skipped_steps = 0;
  int64_t skipped_in_a_row = 0;  // up to now, but those that a lower loss scale may mend
  int64_t micro_steps = 0;
  int64_t optimizer_steps = 0;                                   // applied
  std::map<std::string, int64_t> parameter_steps;                // of parameters that some of them left alone
  std::map<std::string, std::vector<double>> parameter_numbers;  // that the optimizer keeps of each; empty: none
  int64_t schedule_iteration = -1;                               // -1: before the first step
  optim::LossScale loss_scale;
  double last_loss = kNoLoss;   // mean of rank 0's in the last applied step, where "loss_tolerance" asks for it
  double offload_ratio = -1.0;  // of states in files, where it was measured; -1: it was not
  std::string optimizer;        // in a checkpoint: whose states it holds; empty: not told
  std::vector<Hyperparameters> hyperparameters;  // live, by parameter group; none without an optimizer
};

nlohmann::json to_json(const Progress& progress);
/// `own`: this engine's. A hyper-parameter, or a loss scale, that the checkpoint lacks keeps its value from there.
/// Errors: nlohmann::json::exception naming a field that is missing or has another type.
Progress progress_from_json(const nlohmann::json& state, const Progress& own);

/// Lists where a checkpoint and this engine disagree, one line each: such values would be lost silently. Empty: none.
std::vector<std::string> mismatches(const Progress& saved, const Progress& own);

/// This rank's random number generators: the state it needs to continue exactly.
struct Generators {
  at::Tensor cpu, device;   // states; undefined: do not change the generator
  std::string interpreter;  // those of a language binding, as bytes; empty: there are none

  static Generators of(at::Device device);
  static Generators from_json(const std::string& text);
  std::string to_json() const;
  void restore(at::Device device) const;
};

}  // namespace deeptide::engine
