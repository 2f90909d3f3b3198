// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an engine would take of memory and disk, before any of it is taken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/engine.h"

namespace deeptide {

/// Where a planned job's ranks run.
struct PlannedWorld {
  int size = 1;
  int ranks_per_host = 0;  // 0: one host has all
};

/// One rank's, at its peak. Units: bytes.
struct PlanLine {
  MemoryRole role = MemoryRole::parameters;
  int64_t memory_bytes = 0;  // as MemoryLine::predicted_bytes; of what ranks of a host share, its part
  int64_t late_bytes = 0;    // at most so many more while another rank is late
  int64_t file_bytes = 0;
};

/// The memory of one rank in a phase: "initialize", "first forward", or "training": from the first backward on, for
/// buffers are kept from step to step. Units: bytes.
struct PlanPhase {
  std::string name;
  int64_t memory_bytes = 0;
};

/// The engine's own bytes. Activations and what the program itself allocates come on top.
struct MemoryPlan {
  int stage = 0;
  PlannedWorld world;  // with ranks_per_host as it is
  int64_t num_parameters = 0;
  int64_t num_trained = 0;
  int64_t num_units = 0;
  bool shares_memory = false;     // the ranks of the host have one copy of the parameters
  std::vector<PlanLine> lines;    // by role
  std::vector<PlanPhase> phases;  // in order
};

/// Adds up what each component forecasts for itself; an engine with this model, configuration and world has the same
/// numbers in memory(). Allocates nothing: the model may have been built under zero.Init. `options`: groups, optimizer
/// and custom count.
/// Errors: as the engine's, where they follow from model and configuration.
DEEPTIDE_API MemoryPlan plan(const ModelDescription& model, const Config& config, const InitOptions& options = {},
                             const PlannedWorld& world = {});

}  // namespace deeptide
