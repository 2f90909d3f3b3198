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

/// Squares per slice and parameter. A slice is what one rank owns of a unit, also where each rank holds the whole unit:
/// the slices' squares are added in their order, so that all stages give the same bits.
class ParameterNorms {
 public:
  explicit ParameterNorms(const std::vector<sharding::Unit*>& units, int num_slices);

  /// The sums over `numel` elements of a slice of a parameter, begun anew unless they are open; until `settle`.
  optim::NormSums& sums(int slice, int unit, int parameter, int64_t numel);
  /// Closes all open sums: waits for those that a device has made.
  void settle();
  /// Collective. Fetches the slices of the other ranks of `group`, of which this rank has set its own.
  void exchange(comm::Group& group, at::Device device);
  optim::NormSquares whole(int unit, int parameter) const;

 private:
  std::vector<int64_t> first_;  // of each unit, among all parameters
  int64_t num_parameters_ = 0;
  int64_t num_slices_;
  std::map<std::tuple<int, int, int>, optim::NormSums> open_;  // by slice, unit and parameter
  at::Tensor squares_;                                         // (slices, parameters, 2) fp64, on the CPU
};

}  // namespace deeptide::zero
