// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How far training is: every counter and scalar of state, written, read and restored here and nowhere else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "deeptide/config.h"

namespace deeptide::engine {

/// Part of every checkpoint. The same on all ranks.
struct Progress {
  int64_t global_steps = 0;  // applied and skipped
  int64_t skipped_steps = 0;
  int64_t micro_steps = 0;
  int64_t optimizer_steps = 0;                   // applied
  int64_t schedule_iteration = -1;               // -1: before the first step
  std::vector<Hyperparameters> hyperparameters;  // live, by parameter group; none without an optimizer
};

nlohmann::json to_json(const Progress& progress);
/// `own`: this engine's groups. A hyper-parameter that the checkpoint lacks keeps its value from there.
/// Errors: nlohmann::json::exception naming a field that is missing or of another type.
Progress progress_from_json(const nlohmann::json& state, const std::vector<Hyperparameters>& own);

/// What a checkpoint and this engine disagree on, line by line: it would be lost in silence otherwise. Empty: nothing.
std::vector<std::string> mismatches(const Progress& saved, const Progress& own);

/// This rank's random number generators: what it needs to continue exactly where it was.
struct Generators {
  at::Tensor cpu, device;  // states; undefined: leave the generator alone

  static Generators of(at::Device device);
  static Generators from_json(const std::string& text);
  std::string to_json() const;
  void restore(at::Device device) const;
};

}  // namespace deeptide::engine
