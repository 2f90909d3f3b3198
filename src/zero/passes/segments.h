// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands masters and states to a rule as segments, wherever they lie.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "gradients/reducer.h"
#include "optim/rules/rule.h"
#include "tiers/buffer.h"
#include "zero/states/optimizer_states.h"
#include "zero/states/step_counts.h"
#include "zero/transfers/host_exchange.h"

namespace deeptide::zero {

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
  const Hyperparameters& hyper(const Run& run) const { return groups.at(run.group); }
};

struct SegmentAccess {
  tiers::Access master, states;
  bool takes_packed = false;  // whether a packed master is passed as it is; else unpacked
};

/// Outlived by the states.
class Segments {
 public:
  using Visit = std::function<void(tiers::Block block, const optim::Segment& segment)>;

  explicit Segments(const OptimizerStates& states) : states_(states) {}

  /// Visits segments of `range`, elements of the unit's states, block by block: what is resident is one block.
  void each(const UnitPass& pass, const Run& run, tiers::Block range, SegmentAccess access, const Visit& visit) const;
  /// The same over all that this rank has of a run.
  void each(const UnitPass& pass, const Run& run, SegmentAccess access, const Visit& visit) const {
    each(pass, run, states_.own_part(pass.unit, run.begin, run.end), access, visit);
  }
  /// Visits a segment that the host steps of a device's parameters, which follow from it.
  void step_and_return(const UnitPass& pass, tiers::Block block, optim::Segment& segment, const Visit& visit) const;

 private:
  void each_of_part(const UnitPass& pass, const Run& run, const StatePart& part, tiers::Block range,
                    SegmentAccess access, const Visit& visit) const;
  void prefetch_after(const UnitPass& pass, const StatePart& part, tiers::Block block) const;

  const OptimizerStates& states_;
};

}  // namespace deeptide::zero
