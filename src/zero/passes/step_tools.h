// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The parts of an optimizer that its steps use, and the input of one step.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/team_groups.h"
#include "device/memory/memory.h"
#include "zero/passes/publisher.h"
#include "zero/passes/segments.h"
#include "zero/states/optimizer_states.h"
#include "zero/states/policy.h"
#include "zero/states/step_counts.h"
#include "zero/transfers/host_exchange.h"

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
