// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Norms of whole parameters out of the ranks' slices: one small exchange for the whole model.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>
#include <vector>

#include "comm/group.h"
#include "optim/rules/two_pass_rule.h"
#include "sharding/unit.h"

namespace deeptide::zero {

/// Squares per rank and parameter. A rank has those of the slice that it owns of a unit, also where each rank holds the
/// whole unit: they are added in the ranks' order, so that all stages give the same bits.
class ParameterNorms {
 public:
  /// `all`: the ranks of the step.
  ParameterNorms(const std::vector<sharding::Unit*>& units, const comm::Team& all);

  /// The sums over `numel` elements of a slice of a parameter, begun anew unless they are open; until `settle`.
  /// `slice`: of the unit.
  optim::NormSums& sums(int slice, int unit, int parameter, int64_t numel);
  /// Closes all open sums: waits for those that a device has made.
  void settle();
  /// Collective. Fetches the squares of the other ranks of `group`, which is over all; this rank has set its own.
  void exchange(comm::Group& group, at::Device device);
  /// Over all elements, each counted once.
  optim::NormSquares whole(int unit, int parameter) const;

 private:
  std::vector<std::vector<int64_t>> owners_;   // by unit and slice: the slice's rank, among all
  std::vector<std::vector<int64_t>> counted_;  // by unit: the ranks whose squares add up to a parameter's
  std::vector<int64_t> first_;                 // of each unit, among all parameters
  int64_t num_parameters_ = 0;
  std::map<std::tuple<int, int, int>, optim::NormSums> open_;  // by rank, unit and parameter
  at::Tensor squares_;                                         // (ranks, parameters, 2) fp64, on the CPU
};

}  // namespace deeptide::zero
