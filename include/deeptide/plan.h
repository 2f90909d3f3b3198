// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Forecasts the memory and disk that an engine would take, before any of it is taken.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "deeptide/engine.h"

namespace deeptide {

/// The hosts and ranks of a planned job.
struct PlannedWorld {
  int size = 1;
  int ranks_per_host = 0;  // 0: one host has all
  bool is_stage = false;   // they are one stage of a pipeline, which may own no parameters
};

/// One rank's, at its peak. Units: bytes.
struct PlanLine {
  MemoryRole role = MemoryRole::parameters;
  int64_t memory_bytes = 0;  // as MemoryLine::predicted_bytes; of what ranks of a host share, its part
  int64_t late_bytes = 0;    // at most so many more while another rank is late
  int64_t file_bytes = 0;
  int64_t off_device_bytes = 0;  // in the host's memory, beside an accelerator's
};

/// The memory of one rank in a phase: "initialize", "first forward", or "training": from the first backward on, for
/// buffers are kept from step to step. Units: bytes.
struct PlanPhase {
  std::string name;
  int64_t memory_bytes = 0;
};

/// The tensors of one kind that a rank exchanges in a step of the optimizer. Units: bytes.
struct PlanTransfer {
  std::string kind;           // "gradients", "parameters", at stage 0 "summed gradients"
  int64_t bytes = 0;          // of what is made whole or taken apart, as CollectiveLine::bytes
  int64_t within_bytes = 0;   // that this rank sends to ranks of its host
  int64_t between_bytes = 0;  // that it sends to other hosts
};

/// The engine's own bytes. Activations and what the program itself allocates come on top.
struct DEEPTIDE_API MemoryPlan {
  int stage = 0;
  PlannedWorld world;  // with ranks_per_host as it is
  int64_t num_parameters = 0;
  int64_t num_trained = 0;
  int64_t num_units = 0;
  bool shares_memory = false;           // the ranks of the host have one copy of the parameters
  std::vector<PlanLine> lines;          // by role
  std::vector<PlanPhase> phases;        // in order
  std::vector<PlanTransfer> transfers;  // of one rank and step; what ranks of a host share travels nowhere

  /// The bytes of one rank in its largest phase; all figures below are bytes.
  int64_t peak_bytes() const;
  /// The memory and files of a host with all its ranks and their devices.
  int64_t host_bytes() const;
  int64_t host_file_bytes() const;
};

/// Adds up what each component forecasts for itself; an engine with this model, configuration and world has the same
/// numbers in memory(). Allocates nothing: the model may have been built under zero.Init. `options`: groups, optimizer
/// and custom count.
/// Errors: as the engine's, where they follow from model and configuration.
DEEPTIDE_API MemoryPlan plan(const ModelDescription& model, const Config& config, const InitOptions& options = {},
                             const PlannedWorld& world = {});

/// A folder for files. Folders of one `device` (a file system) share what is free.
struct FolderSpace {
  std::string folder;
  int64_t free_bytes = 0;
  uint64_t device = 0;
};

/// The room that one host has left. Units: bytes.
struct MachineLimits {
  int64_t memory_bytes = 0;
  std::string bound;  // what leaves no more memory: "available memory", "the limit of /sys/fs/cgroup/job"
  /// The room in /dev/shm, where workers of data loaders put their batches. An engine's shared memory has no file
  /// there: it counts as memory. Absent: there is none.
  std::optional<int64_t> shared_memory_bytes;
  /// The memory that a process may lock (RLIMIT_MEMLOCK). The engine locks nothing: files go through memory that
  /// io_uring pins per transfer. Absent: no limit.
  std::optional<int64_t> lockable_bytes;
  std::vector<FolderSpace> folders;  // for files; blocks are striped over them
};

/// This machine's. `folders`: need not exist.
DEEPTIDE_API MachineLimits machine_limits(const std::vector<std::string>& folders = {});

/// Why the plan does not fit the machine; empty if it fits.
DEEPTIDE_API std::string why_not(const MemoryPlan& plan, const MachineLimits& machine);

/// One stage and placement, and what it takes.
struct PlanChoice {
  std::string name;      // "stage 2, optimizer states in files"
  std::string sections;  // what to write into the configuration: JSON, {"zero_optimization": …}
  MemoryPlan plan;
  std::string why_not;  // empty: it fits
};

/// Each stage, and with `machine.folders` each placement in files, from the fastest to the smallest; those that the
/// configuration's optimizer or options exclude are left out. The first that fits is recommended. Errors: as `plan`.
DEEPTIDE_API std::vector<PlanChoice> plan_choices(const ModelDescription& model, const Config& config,
                                                  const MachineLimits& machine, const InitOptions& options = {},
                                                  const PlannedWorld& world = {});

}  // namespace deeptide
