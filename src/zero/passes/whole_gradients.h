// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whole sums, where each rank steps all: gathered from the ranks' shards, several under way.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/team_groups.h"
#include "device/memory/memory.h"
#include "gradients/reducer.h"
#include "zero/states/optimizer_states.h"
#include "zero/transfers/unit_gathers.h"

namespace deeptide::zero {

/// One step's. All ranks start equal units in one order.
class WholeGradients {
 public:
  /// `pool`: of what is gathered.
  WholeGradients(const OptimizerStates& states, const comm::TeamGroups& teams, device::BufferPool& pool,
                 const gradients::Reducer& reducer)
      : states_(states),
        teams_(teams),
        pool_(pool),
        reducer_(reducer),
        gathers_(teams.whole(), "gathering gradients of") {}

  void start(int unit, comm::OwnRow own = comm::OwnRow::copied);
  bool has_room() const { return gathers_.has_room(); }
  /// Returns the first one that was started (numel,) fp32, to be put into the pool. Errors: CommError.
  at::Tensor wait_first() { return gathers_.wait_first(); }

 private:
  const OptimizerStates& states_;
  const comm::TeamGroups& teams_;
  device::BufferPool& pool_;
  const gradients::Reducer& reducer_;
  UnitGathers gathers_;
};

}  // namespace deeptide::zero
