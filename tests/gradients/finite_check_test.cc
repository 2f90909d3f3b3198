// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A bad gradient is named by ranks of the job, whatever team reduces the unit.
#include "gradients/finite_check.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "gradients/training.h"
#include "world/mesh.h"

namespace deeptide::gradients {
namespace {

using world::Axis;

/// A unit of 4 elements of rank 3 of a mesh of 2 x 2, over the data axis: ranks 1 and 3. `shared_by`: the axis of the
/// ranks that share its slices.
std::unique_ptr<sharding::Unit> unit_of_rank_3(const std::vector<Axis>& shared_by,
                                               const std::vector<Axis>& reduced_by) {
  const world::Mesh mesh(4, {1, 2, 2, 1, 1});
  sharding::Parameter p;
  p.name = "p";
  p.tensors = {at::zeros({4})};
  p.numel = 4;
  std::vector<sharding::Parameter> members;
  members.push_back(std::move(p));
  const sharding::UnitPlacement place{sharding::UnitMemory::whole, comm::Team::along(mesh, 3, shared_by),
                                      comm::Team::along(mesh, 3, reduced_by)};
  return std::make_unique<sharding::Unit>(0, layout_of("u", {4}, place.shard_over.size(), 0), std::move(members),
                                          place);
}

TEST(FiniteCheck, NamesARankOfTheJobNotAnIndexInTheTeam) {
  const auto unit = unit_of_rank_3({Axis::data}, {Axis::data});
  ASSERT_EQ(unit->reduce_over().ranks(), (std::vector<int>{1, 3}));
  FiniteCheck check({unit.get()}, 2, at::zeros({1}, at::kDouble), FiniteCheckTime::each_sum);
  check.note_element(0, 2, world::TeamIndex(1));
  ASSERT_TRUE(check.bad());
  EXPECT_EQ(check.bad()->rank, world::WorldRank(3));
  EXPECT_EQ(unit->reduce_over().index_of(check.bad()->rank), world::TeamIndex(1));
  EXPECT_EQ(unit->reduce_over().index_of(world::WorldRank(2)), world::TeamIndex::none);
}

TEST(FiniteCheck, CountsASliceOnItsFirstHolderOnly) {
  const at::Tensor squares = at::full({1}, 5.0, at::kDouble);
  const auto own = unit_of_rank_3({Axis::data}, {Axis::data});
  const auto copy = unit_of_rank_3({Axis::expert}, {Axis::data, Axis::expert});  // rank 1 holds the same slice
  EXPECT_EQ(FiniteCheck({own.get()}, 2, squares, FiniteCheckTime::each_sum).total({true}), 5.0);
  EXPECT_EQ(FiniteCheck({copy.get()}, 4, squares, FiniteCheckTime::each_sum).total({true}), 0.0);
}

}  // namespace
}  // namespace deeptide::gradients
