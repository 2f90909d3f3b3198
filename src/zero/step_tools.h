// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What an optimizer's steps are made with, and what one of them brings.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/team_groups.h"
#include "device/memory.h"
#include "zero/host_exchange.h"
#include "zero/optimizer_states.h"
#include "zero/policy.h"
#include "zero/publisher.h"
#include "zero/segments.h"
#include "zero/step_counts.h"

namespace deeptide::zero {

struct StepTools {
  OptimizerStates& states;
  StepCounts& counts;
  const Segments& segments;
  Publisher& publisher;
  const StagePolicy& policy;
  const comm::TeamGroups& teams;
  at::Device device;
  device::BufferPool& pool;                       // of whole gradients and matrices
  const std::unique_ptr<HostExchange>& exchange;  // null: states are stepped where parameters are
  const at::Tensor& host_directions;              // (N,) bf16, of a unit's matrices that the host steps for a device

  const optim::Rule& rule() const { return states.rule(); }
  comm::Group& group() const { return teams.whole(); }
  /// Whether each rank steps all: it needs the sums of all ranks.
  bool gathers_gradients() const { return !policy.shard_optimizer && group().size() > 1; }
};

struct StepInput {
  double gradient_scale;
  const std::vector<Hyperparameters>& groups;
  const ActiveParameters& active;
};

}  // namespace deeptide::zero
