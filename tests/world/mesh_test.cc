// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks, coordinates and peers on the grid with named axes.
#include "world/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "deeptide/errors.h"

namespace deeptide::world {
namespace {

std::string error_of(int world_size, const Mesh::Sizes& sizes) {
  try {
    Mesh mesh(world_size, sizes);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

TEST(Mesh, PutsAllRanksOnTheDataAxisByDefault) {
  for (int size : {1, 2, 7}) {
    const Mesh mesh = Mesh::data_parallel(size);
    EXPECT_EQ(mesh.size(Axis::data), size);
    EXPECT_EQ(mesh.size(Axis::tensor), 1);
    EXPECT_EQ(mesh.text(), "data=" + std::to_string(size));
    EXPECT_EQ(static_cast<int>(mesh.peers(size - 1, Axis::data).size()), size);
    EXPECT_EQ(mesh.peers(size - 1, Axis::pipe), std::vector<int>{size - 1});
  }
}

TEST(Mesh, GivesEveryRankItsOwnCoordinates) {
  const Mesh mesh(24, {2, 3, 1, 2, 2});
  std::set<Mesh::Coordinates> seen;
  for (int rank = 0; rank < 24; ++rank) {
    const auto coordinates = mesh.coordinates(rank);
    EXPECT_EQ(mesh.rank(coordinates), rank);
    seen.insert(coordinates);
  }
  EXPECT_EQ(seen.size(), 24u);
  EXPECT_EQ(mesh.text(), "pipe=2 data=3 sequence=2 tensor=2");
}

TEST(Mesh, LetsNeighboursDifferInTheInnermostAxis) {
  const Mesh mesh(8, {2, 2, 1, 1, 2});
  EXPECT_EQ(mesh.peers(2, Axis::tensor), (std::vector<int>{2, 3}));
  EXPECT_EQ(mesh.peers(5, Axis::data), (std::vector<int>{5, 7}));
  EXPECT_EQ(mesh.peers(6, Axis::pipe), (std::vector<int>{2, 6}));
}

TEST(Mesh, SplitsTheWorldIntoEqualPeerGroupsAlongEachAxis) {
  const Mesh mesh(12, {1, 3, 2, 1, 2});
  for (int i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    std::set<std::vector<int>> groups;
    for (int rank = 0; rank < 12; ++rank) groups.insert(mesh.peers(rank, axis));
    EXPECT_EQ(static_cast<int>(groups.size()) * mesh.size(axis), 12) << axis_name(axis);
  }
}

TEST(Mesh, NamesCoordinatesWhereThereIsMoreThanTheDataAxis) {
  EXPECT_EQ(Mesh::data_parallel(8).name(5), "rank 5");
  EXPECT_EQ(Mesh(8, {2, 2, 1, 1, 2}).name(5), "rank 5 (pipeline 1, data 0, tensor 1)");
  EXPECT_EQ(Mesh(4, {1, 2, 1, 1, 2}).name(2), "rank 2 (data 1, tensor 0)");
  EXPECT_EQ(Mesh(2, {2, 1, 1, 1, 1}).name(1), "rank 1 (pipeline 1, data 0)");
}

TEST(Mesh, RejectsSizesThatDoNotMultiply) {
  EXPECT_EQ(error_of(4, {1, 3, 1, 1, 1}), "the mesh data=3 has 3 ranks, but the world has 4");
  EXPECT_EQ(error_of(4, {1, 0, 1, 1, 4}), "mesh axis 'data' has size 0, expected at least 1");
  EXPECT_EQ(error_of(4, {2, 2, 1, 1, 1}), "none");
}

}  // namespace
}  // namespace deeptide::world
