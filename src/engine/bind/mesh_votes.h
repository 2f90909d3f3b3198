// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Votes of all ranks of a job, those of other stages too.
#pragma once

#include <span>
#include <vector>

#include "engine/bind/channels.h"

namespace deeptide::engine {

/// Collective over the mesh, between rounds, at a point that all stages come to in one order. Values are in the order
/// of world ranks: the pipe axis is the outermost.
class MeshVotes {
 public:
  explicit MeshVotes(Channels& channels) : channels_(channels) {}

  /// Every rank receives every rank's value. Errors: as Group::wait.
  template <typename Value>
  std::vector<Value> exchange(const Value& own, const comm::Site& site) {
    return exchange_all(std::span<const Value>(&own, 1), site);
  }
  /// Every rank receives every rank's values, equally many, one rank after the other.
  template <typename Value>
  std::vector<Value> exchange_all(std::span<const Value> own, const comm::Site& site) {
    return with_other_stages(channels_.rounds().exchange_all(own, site), site);
  }
  /// Likewise, where the ranks of a stage know each other's values already.
  template <typename Value>
  std::vector<Value> with_other_stages(std::vector<Value> of_stage, const comm::Site& site) {
    Stages* const stages = channels_.stages();
    return stages == nullptr ? of_stage : stages->exchange_all(std::span<const Value>(of_stage), site);
  }

 private:
  Channels& channels_;
};

}  // namespace deeptide::engine
