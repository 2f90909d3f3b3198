// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Brings stepped parameters to where they lie, and from there to all ranks.
#pragma once

#include <memory>
#include <vector>

#include "zero/states/optimizer_states.h"
#include "zero/states/step_counts.h"
#include "zero/transfers/host_exchange.h"
#include "zero/transfers/parameters_out.h"
#include "zero/transfers/unit_gathers.h"

namespace deeptide::zero {

/// Outlived by the states.
class Publisher {
 public:
  Publisher(const OptimizerStates& states, const StagePolicy& policy, const std::shared_ptr<device::Ledger>& ledger,
            at::Device device);

  /// Parameters follow from masters that are memory of their own.
  void narrow(int unit);
  /// Hands a unit over whose shard has its new values. Ranks that step all of a unit have them already.
  void add(int unit, Publication& publication) const;
  /// Does the rest for a unit that a pass has stepped, if it `moved`, but for what passes to files.
  void publish(int unit, bool moved, const HostExchange::Step* copies, Publication& publication);
  /// Does that, once all work of the device is issued: here the host waits.
  void publish_through_files(const std::vector<std::vector<Run>>& runs, Publication& publication);

  /// Makes the current lane's later work follow the copies of parameters that leave the device.
  void join() const {
    if (out_) out_->join();
  }
  /// Memory in which parameters leave a device.
  int64_t nbytes() const { return out_ ? out_->nbytes() : 0; }

 private:
  void send(int unit);
  bool leaves_for_files(int unit) const;

  const OptimizerStates& states_;
  StagePolicy policy_;
  std::unique_ptr<ParametersOut> out_;  // null: the device steps no parameters that lie off it
};

}  // namespace deeptide::zero
