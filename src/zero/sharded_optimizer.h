// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps units by a rule, whatever the rule's step depends on, and publishes the new parameters to all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/team_groups.h"
#include "device/memory.h"
#include "gradients/reducer.h"
#include "optim/rule.h"
#include "optim/two_pass_rule.h"
#include "sharding/unit.h"
#include "tiers/buffer.h"
#include "zero/arrivals.h"
#include "zero/custom_steps.h"
#include "zero/host_exchange.h"
#include "zero/optimizer_states.h"
#include "zero/parameter_norms.h"
#include "zero/parameters_out.h"
#include "zero/policy.h"
#include "zero/sign_exchange.h"
#include "zero/unit_gathers.h"

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
    if (out_) out_->join();
    return states_;
  }
  const optim::Rule& rule() const { return states_.rule(); }
  /// Memory of masters, states, and the errors of signs, and that in which parameters leave a device.
  int64_t predicted_bytes() const {
    return states_.predicted_bytes() + (signs_ ? signs_->predicted().errors : 0) + (out_ ? out_->nbytes() : 0);
  }
  /// Page-locked memory through which gradients and parameters pass where the host steps what a device trains, or
  /// that of gradients for the caller's own optimizer. Else 0.
  int64_t passing_bytes() const {
    if (custom_) return custom_->host_gradient_bytes();
    if (!exchange_) return 0;
    return exchange_->nbytes() + (host_directions_.defined() ? static_cast<int64_t>(host_directions_.nbytes()) : 0);
  }
  /// Null: every step needs the gradients' mean.
  SignExchange* signs() { return signs_.get(); }
  const SignExchange* signs() const { return signs_.get(); }
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
  /// Which parts of units a pass goes over. The device's work is issued before the host begins with its own.
  enum class Side : uint8_t { both, device, host };
  /// State that the passes over one unit share.
  struct UnitPass {
    int unit;
    gradients::UnitGradient gradient;  // over the unit's states; none in a second pass
    double gradient_scale;
    const std::vector<Hyperparameters>& groups;
    const gradients::Reducer* reducer = nullptr;  // whose gradients this pass reads, unit after unit
    HostExchange::Step* copies = nullptr;         // between device and host, if the host steps
    Side side = Side::both;
    tiers::Block elements{0, INT64_MAX};  // of the unit: what an elementwise step moves
    int64_t gradient_begin = 0;           // of the states' elements: the first of `gradient`

    optim::StepTerms terms(const Run& run) const { return {run.steps, gradient_scale}; }
  };
  struct SegmentAccess {
    tiers::Access master, states;
    bool takes_packed = false;  // whether a packed master is passed as it is; else unpacked
  };
  using Visit = std::function<void(tiers::Block block, const optim::Segment& segment)>;

  /// Each rank steps all: it needs the sums of all ranks.
  bool gathers_gradients() const { return !policy_.shard_optimizer && group_.size() > 1; }
  void start_gathering(int unit, const gradients::Reducer& reducer, UnitGathers& gathers,
                       comm::OwnRow own = comm::OwnRow::copied);
  tiers::Block own_part(int unit, int64_t begin, int64_t end) const;
  void announce(int unit, const at::Tensor& gradient, HostExchange::Step& copies) const;
  void each_segment(const UnitPass& pass, const Run& run, tiers::Block range, SegmentAccess access, const Visit& visit);
  void each_segment(const UnitPass& pass, const Run& run, const StatePart& part, tiers::Block range,
                    SegmentAccess access, const Visit& visit);
  void step_and_return(const UnitPass& pass, tiers::Block block, optim::Segment& segment, const Visit& visit) const;
  void prefetch_after(const UnitPass& pass, const StatePart& part, tiers::Block block);
  void step_by_rule(const gradients::Reducer& reducer, double gradient_scale,
                    const std::vector<Hyperparameters>& groups, const ActiveParameters& active,
                    Publication& publication);
  void step_by_caller(const gradients::Reducer& reducer, double gradient_scale,
                      const std::vector<Hyperparameters>& groups, const ActiveParameters& active,
                      Publication& publication);
  void take_mean(const UnitPass& pass, const Run& run, const at::Tensor& mean);
  void step_by_signs(gradients::Reducer& reducer, double gradient_scale, const std::vector<Hyperparameters>& groups,
                     const ActiveParameters& active);
  void narrow_master(int unit);
  void send_parameters(int unit);
  bool leaves_for_files(int unit) const;
  void publish_through_files(const std::vector<std::vector<Run>>& runs, Publication& publication);
  void step_own_first(UnitPass pass, gradients::UnitGradient own, const std::vector<Run>& runs, UnitGathers& gathers);
  void first_pass(const UnitPass& pass, const std::vector<Run>& runs, ParameterNorms* norms);
  void step_by_norms(ParameterNorms& norms, const std::vector<std::vector<Run>>& runs, double gradient_scale,
                     const std::vector<Hyperparameters>& groups, HostExchange::Step* copies, Publication& publication);
  void step_elements(const UnitPass& pass, const Run& run);
  void measure(const UnitPass& pass, const Run& run, ParameterNorms& norms);
  void apply_ratios(const UnitPass& pass, const std::vector<Run>& runs, const std::vector<double>& ratios);
  void step_matrices(const UnitPass& pass, const std::vector<Run>& runs);
  at::Tensor whole_direction(int unit, at::Tensor own);
  void apply_update(const UnitPass& pass, const Run& run, const at::Tensor& direction);
  void publish(int unit, Publication& publication) const;
  void publish_masters(const std::vector<int>& units, const comm::TeamGroups& over);

  OptimizerStates states_;
  std::unique_ptr<CustomSteps> custom_;
  std::unique_ptr<SignExchange> signs_;
  std::unique_ptr<HostExchange> exchange_;  // null: states are stepped where parameters are
  std::unique_ptr<ParametersOut> out_;      // null: the device steps no parameters that lie off it
  StagePolicy policy_;
  comm::TeamGroups teams_;  // channels
  comm::Group& group_;      // over all ranks that train
  at::Device device_;
  Arrivals* arrivals_ = nullptr;              // null: `step` waits
  sharding::Residency* residency_ = nullptr;  // null: nobody is told
  device::BufferPool pool_;                   // of whole gradients and matrices
  at::Tensor host_directions_;                // (N,) bf16, of the matrices of a unit that the host steps for a device
  std::vector<sharding::Unit*> units_;
};

}  // namespace deeptide::zero
