// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps units by a rule, whatever the rule's step depends on, and publishes the new parameters to all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/team_groups.h"
#include "device/memory/memory.h"
#include "gradients/reducer.h"
#include "optim/rules/rule.h"
#include "sharding/unit.h"
#include "zero/passes/step_tools.h"
#include "zero/steps/custom_steps.h"
#include "zero/steps/sign_steps.h"
#include "zero/transfers/arrivals.h"

namespace deeptide::zero {

/// Steps trainable units by a rule. Each step brings the groups' hyper-parameters.
class ShardedOptimizer {
 public:
  /// `place`: absent: states are resident beside the parameters, and counted in `ledger`; so are those that the host
  /// does not step, where it steps others. `custom`: steps in the place of the rule, which is its CustomRule, and
  /// outlives this. Errors: as CustomSteps.
  ShardedOptimizer(std::vector<sharding::Unit*> units, const optim::Rule& rule,
                   const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                   std::shared_ptr<device::Ledger> ledger, comm::TeamGroups teams, at::Device device,
                   StatePlacement place = {}, CustomOptimizer* custom = nullptr, StateTypes types = {});
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Collective. One step with the reducer's accumulators times `gradient_scale`, then every parameter is in place
  /// again: whole on every rank (stages 0-2), or in the shards, to be gathered when needed (stage 3); see also
  /// `publish_through`. Parameters that are not `active` keep their values and states.
  void step(gradients::Reducer& reducer, double gradient_scale, const std::vector<Hyperparameters>& groups,
            const ActiveParameters& active = {});

  /// From now on `step` returns as soon as the gathers of whole units are started, and leaves them to `arrivals`, which
  /// outlives this.
  void publish_through(Arrivals& arrivals) { arrivals_ = &arrivals; }
  /// From now on `step` tells `residency`, which outlives this, of each sharded unit that has its new values.
  void tell(sharding::Residency& residency) { residency_ = &residency; }

  const OptimizerStates& states() const { return states_; }
  /// To change them: the current lane's work comes after the copies of parameters that leave the device.
  OptimizerStates& states() {
    publisher_.join();
    return states_;
  }
  const StepCounts& counts() const { return counts_; }
  StepCounts& counts() { return counts_; }
  const optim::Rule& rule() const { return states_.rule(); }
  /// Memory of masters, states, and the errors of signs, and that in which parameters leave a device.
  int64_t predicted_bytes() const {
    return states_.predicted_bytes() + (signs_ ? signs_->exchange().predicted().errors : 0) + publisher_.nbytes();
  }
  /// Page-locked memory through which gradients and parameters pass where the host steps what a device trains, or
  /// that of gradients for the caller's own optimizer. Else 0.
  int64_t passing_bytes() const {
    if (custom_) return custom_->host_gradient_bytes();
    if (!exchange_) return 0;
    return exchange_->nbytes() + (host_directions_.defined() ? static_cast<int64_t>(host_directions_.nbytes()) : 0);
  }
  /// Null: every step needs the gradients' mean.
  const SignExchange* signs() const { return signs_ ? &signs_->exchange() : nullptr; }
  /// SignExchange::errors; none: no step exchanges signs.
  std::vector<at::Tensor> sign_errors() const {
    return signs_ ? signs_->exchange().errors() : std::vector<at::Tensor>();
  }
  /// Null: the rule steps.
  const CustomSteps* custom() const { return custom_.get(); }
  CustomSteps* custom() { return custom_.get(); }
  /// After states were written (load): parameters follow from the masters, on all ranks. Collective.
  void publish_all() { publish_all(teams_); }
  /// Over another group, where reductions may be under way.
  void publish_all(const comm::TeamGroups& over);
  /// After the master of one parameter was written: it follows, on all ranks. `unit`: by position. Collective.
  void publish_parameter(int unit, int parameter, const comm::TeamGroups& over);

 private:
  void step_by_caller(const gradients::Reducer& reducer, const StepInput& input, Publication& publication);
  void publish_masters(const std::vector<int>& units, const comm::TeamGroups& over);

  std::vector<sharding::Unit*> units_;
  StagePolicy policy_;
  comm::TeamGroups teams_;  // channels
  OptimizerStates states_;
  StepCounts counts_;
  Segments segments_;
  Publisher publisher_;
  device::BufferPool pool_;                 // of whole gradients and matrices
  std::unique_ptr<HostExchange> exchange_;  // null: states are stepped where parameters are
  at::Tensor host_directions_;              // as in StepTools
  StepTools tools_;                         // all of these
  std::unique_ptr<CustomSteps> custom_;
  std::unique_ptr<SignSteps> signs_;
  Arrivals* arrivals_ = nullptr;              // null: `step` waits
  sharding::Residency* residency_ = nullptr;  // null: nobody is told
};

}  // namespace deeptide::zero
