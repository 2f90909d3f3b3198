// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks of a job as a design sees them: a mesh, hosts, and what a start finds out about them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/team.h"
#include "deeptide/tensor_team.h"
#include "world/mesh.h"

namespace deeptide::engine {

/// Parameters that live along axes of their own, such as experts, or what is sharded within a part of the ranks.
struct Tenancy {
  std::string prefix;  // of their names, unless `names` lists them
  /// A slice per rank of these axes. They are the innermost of `reduce_over`, so that its team is one team of
  /// `shard_over` after the other.
  std::vector<world::Axis> shard_over;
  std::vector<world::Axis> reduce_over;  // gradients are summed over them
  std::set<std::string> names = {};
  /// Ranks along the tensor axis have parts of a gradient, which add up; false: each has all of it.
  bool adds_up = false;
};

/// The axes of a job beyond the data axis.
struct Axes {
  world::Mesh::Sizes sizes{1, 1, 1, 1, 1};
  std::vector<Tenancy> tenancies;
  std::vector<TensorSlice> slices = {};
  std::shared_ptr<TensorTeam> tensor_team = {};  // null: there is no tensor axis

  /// Errors: ConfigError if the sizes do not multiply to `world_size`.
  world::Mesh mesh_of(int world_size) const { return {world_size, sizes}; }
};

struct Topology {
  world::Mesh mesh = world::Mesh::data_parallel(1);
  int rank = 0;                   // whose share is designed; on paper the first rank's
  int on_host = 1;                // ranks of this host that reach each other's memory
  bool uniform = true;            // every host has as many
  bool in_order = true;           // of consecutive numbers
  bool is_planned_stage = false;  // on paper a stage has a mesh of its own
  bool can_share = true;          // false: a host was found to have no memory for its ranks to share
  /// The measured share of states in files, or off a device; absent: not measured (yet).
  std::optional<double> ratio = {};
  std::vector<Tenancy> tenancies = {};             // parameters that none of them names live along `data_axes`
  std::map<std::string, TensorSlice> slices = {};  // parameters of which this rank has a slice, by name

  /// The axes of the ranks that take part in every round and every step. Ranks along the tensor axis train on equal
  /// batches, all others on different ones.
  std::vector<world::Axis> data_axes() const;
  comm::Team team(const std::vector<world::Axis>& axes) const { return comm::Team::along(mesh, rank, axes); }
  comm::Team data() const { return team(data_axes()); }
  /// How many of their batches differ.
  int num_batches() const { return data().size() / mesh.size(world::Axis::tensor); }
  /// The tenancy of a parameter of this name: an index into `tenancies`, or -1.
  int tenancy_of(const std::string& name) const;

  /// Whether other stages of a pipeline may have parameters.
  bool is_stage() const { return is_planned_stage || mesh.size(world::Axis::pipe) > 1; }
  /// Whether all ranks are on one host.
  bool is_one_host() const { return on_host == data().size(); }
  /// Whether several ranks share each of several hosts, so that collectives go host by host.
  bool has_two_levels() const { return on_host > 1 && uniform && !is_one_host(); }
};

}  // namespace deeptide::engine
