// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds which ranks of a mesh belong together.
#include "comm/team.h"

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace deeptide::comm {

using world::TeamIndex;
using world::WorldRank;

namespace {

/// Whether the two ranks differ along `axes` at most.
bool differ_along(const world::Mesh& mesh, int a, int b, const std::vector<world::Axis>& axes) {
  const auto left = mesh.coordinates(a), right = mesh.coordinates(b);
  for (int axis = 0; axis < world::kNumAxes; ++axis) {
    const bool free = std::find(axes.begin(), axes.end(), static_cast<world::Axis>(axis)) != axes.end();
    if (!free && left[axis] != right[axis]) return false;
  }
  return true;
}

}  // namespace

Team::Team(std::string name, std::vector<int> ranks, int index)
    : name_(std::move(name)), ranks_(std::move(ranks)), index_(index) {}

Team Team::whole(const World& world) {
  std::vector<int> ranks(world.size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return {"world", std::move(ranks), world.rank};
}

Team Team::along(const world::Mesh& mesh, int rank, const std::vector<world::Axis>& axes) {
  if (axes.empty()) throw ConfigError("a team needs at least one axis of the mesh " + mesh.text());
  std::string name;
  for (const world::Axis axis : axes) name += (name.empty() ? "" : "+") + std::string(world::axis_name(axis));
  std::vector<int> ranks;
  int index = 0;
  for (int other = 0; other < mesh.num_ranks(); ++other) {
    if (!differ_along(mesh, rank, other, axes)) continue;
    if (other == rank) index = static_cast<int>(ranks.size());
    ranks.push_back(other);
  }
  return {std::move(name), std::move(ranks), index};
}

WorldRank Team::world_rank(TeamIndex index) const {
  return index == TeamIndex::none ? WorldRank::none : WorldRank(ranks_.at(number(index)));
}

TeamIndex Team::index_of(WorldRank rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), number(rank));
  return found == ranks_.end() ? TeamIndex::none : TeamIndex(found - ranks_.begin());
}

std::string Team::key() const { return name_ + " of rank " + std::to_string(ranks_.front()); }

World Team::within(const World& world) const {
  if (size() == world.size) return world;
  World own = world;
  own.rank = index_;
  own.size = size();
  own.store = c10::make_intrusive<c10d::PrefixStore>("deeptide/team/" + key(), world.store);
  return own;
}

}  // namespace deeptide::comm
