// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A set of ranks that act together, made from the mesh's axes.
#pragma once

#include <string>
#include <vector>

#include "deeptide/world.h"
#include "world/mesh.h"
#include "world/rank.h"

namespace deeptide::comm {

/// The ranks over which something is sharded, replicated or reduced. A tensor's owner is an index in a team, never a
/// world rank. Value type.
class Team {
 public:
  /// All ranks, in order.
  static Team whole(const World& world);
  /// The ranks that share `rank`'s coordinates on every other axis, ascending. The name joins the axes: "data",
  /// "data+expert". Errors: ConfigError if `axes` is empty.
  static Team along(const world::Mesh& mesh, int rank, const std::vector<world::Axis>& axes);

  const std::string& name() const { return name_; }
  /// World ranks, in the team's order.
  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// This rank's index in `ranks()`.
  int index() const { return index_; }
  /// This rank's world rank, as errors and logs print it.
  int rank() const { return ranks_[index_]; }
  /// None for none.
  world::WorldRank world_rank(world::TeamIndex index) const;
  /// The other way round; none for a rank outside this team.
  world::TeamIndex index_of(world::WorldRank rank) const;
  /// Distinguishes this team from others of its name in the mesh by its first rank: "data of rank 2".
  std::string key() const;
  /// The world as this team sees it: its ranks only, counted by index, with separate keys in the store.
  World within(const World& world) const;

  bool operator==(const Team&) const = default;

 private:
  Team(std::string name, std::vector<int> ranks, int index);

  std::string name_;
  std::vector<int> ranks_;
  int index_;
};

}  // namespace deeptide::comm
