// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Teams of a mesh, collectives within them, and tensors from one rank to another.
#include "comm/team.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "comm/group.h"
#include "host/host.h"
#include "on_hosts.h"

namespace deeptide::comm::team_test {
namespace {

using at::Tensor;
using host::Host;
using world::Axis;
using world::Mesh;

const Site kHere{"step", "testing"};

Tensor iota(int64_t first, int64_t count) { return at::arange(first, first + count, at::kFloat); }

TEST(Team, HoldsTheRanksThatDifferAlongItsAxesOnly) {
  const Mesh mesh(12, {2, 3, 1, 1, 2});  // pipe, data, expert, sequence, tensor
  const Team data = Team::along(mesh, 9, {Axis::data});
  EXPECT_EQ(data.name(), "data");
  EXPECT_EQ(data.ranks(), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(data.index(), 1);
  EXPECT_EQ(data.rank(), 9);
  const Team both = Team::along(mesh, 9, {Axis::data, Axis::tensor});
  EXPECT_EQ(both.name(), "data+tensor");
  EXPECT_EQ(both.ranks(), (std::vector<int>{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(Team::along(mesh, 9, {Axis::expert}).ranks(), std::vector<int>{9});
  EXPECT_THROW(Team::along(mesh, 9, {}), ConfigError);
}

TEST(Team, CoversTheWorldOnceAndAgreesOnItsMembers) {
  const Mesh mesh(12, {2, 3, 1, 1, 2});
  for (const Axis axis : {Axis::pipe, Axis::data, Axis::expert, Axis::sequence, Axis::tensor}) {
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      const Team own = Team::along(mesh, rank, {axis});
      EXPECT_EQ(own.ranks(), mesh.peers(rank, axis));
      for (const int other : own.ranks()) {
        EXPECT_EQ(Team::along(mesh, other, {axis}).key(), own.key());
        EXPECT_EQ(Team::along(mesh, other, {axis}).ranks(), own.ranks());
      }
    }
  }
}

TEST(Team, OfTheDataAxisAloneIsTheWorld) {
  for (int size : {1, 2, 5}) {
    for (int rank = 0; rank < size; ++rank) {
      World world;
      world.rank = rank;
      world.size = size;
      const Team data = Team::along(Mesh::data_parallel(size), rank, {Axis::data});
      EXPECT_EQ(data.ranks(), Team::whole(world).ranks());
      EXPECT_EQ(data.index(), rank);
    }
  }
}

enum class Way : uint8_t { network, shared_memory };

class Ways : public testing::TestWithParam<Way> {
 protected:
  std::shared_ptr<Host> host_of(const World& own) const {
    return Host::find(own, "host", GetParam() == Way::shared_memory);
  }
};

// Six ranks as a grid of 2 x 3: every rank is in two teams, whose collectives run at the same time.
TEST_P(Ways, CarryCollectivesWithinEachTeam) {
  run_ranks(6, [&](const World& world) {
    const Mesh mesh(6, {2, 3, 1, 1, 1});
    for (const Axis axis : {Axis::pipe, Axis::data}) {
      const Team team = Team::along(mesh, world.rank, {axis});
      Group group(world, team, "test", {kLong, board_of(world), host_of(team.within(world))});
      ASSERT_EQ(group.size(), mesh.size(axis));
      const Tensor gathered = at::empty({group.size() * 4});
      auto pending = group.all_gather(gathered, iota(10 * world.rank, 4));
      group.wait(pending, kHere);
      for (int i = 0; i < group.size(); ++i) {
        EXPECT_TRUE(at::equal(gathered.narrow(0, 4 * i, 4), iota(10 * team.ranks()[i], 4)));
      }
      const Tensor sum = at::empty({2});
      pending = group.reduce_scatter(sum, at::zeros({2 * group.size()}).fill_(world.rank));
      group.wait(pending, kHere);
      float expected = 0;
      for (const int rank : team.ranks()) expected += static_cast<float>(rank);
      EXPECT_TRUE(at::equal(sum, at::zeros({2}).fill_(expected)));
    }
  });
}

// Around a ring in both directions, several tensors under way at once, sizes below and above a slot.
TEST_P(Ways, AreWaitedForThoughARankOfAnotherTeamHasEnded) {
  run_ranks(4, [&](const World& world) {
    const Team team = Team::along(Mesh(4, {2, 2, 1, 1, 1}), world.rank, {Axis::data});
    const auto board = board_of(world);
    Group group(world, team, "test", {.timeout = kLong, .board = board, .host = host_of(team.within(world))});
    group.barrier(kHere);
    if (world.rank >= 2) return board->report_end("has ended training");
    if (world.rank == 0) std::this_thread::sleep_for(6 * world::kPollFailures);
    group.barrier(kHere);
  });
}

TEST_P(Ways, CarryTensorsFromRankToRankInOrder) {
  for (int size : {2, 3, 4}) {
    run_ranks(size, [&](const World& world) {
      Group group(world, Team::whole(world), "peers",
                  {.timeout = kLong, .board = board_of(world), .host = host_of(world), .peers = PeerTraffic::yes});
      const int next = (world.rank + 1) % size, previous = (world.rank + size - 1) % size;
      for (const int64_t numel : {1, 17, 8192, 8193, 100'000}) {
        std::vector<Pending> under_way;
        std::vector<Tensor> received;
        for (int i = 0; i < 3; ++i) {
          under_way.push_back(group.send(iota(1000 * world.rank + i, numel), next));
          under_way.push_back(group.send(iota(5000 * world.rank + i, numel), previous));
          received.push_back(at::empty({numel}));
          under_way.push_back(group.receive(received.back(), previous));
          received.push_back(at::empty({numel}));
          under_way.push_back(group.receive(received.back(), next));
        }
        for (bool all = false; !all;) {  // no order of waiting is needed: both ends make progress in it
          all = true;
          for (auto& pending : under_way) {
            all = group.wait_for(pending, std::chrono::milliseconds(1), kHere) && all;
          }
        }
        for (int i = 0; i < 3; ++i) {  // of two ranks, next and previous are one, and its transfers come in order
          EXPECT_TRUE(at::equal(received[2 * i], iota(1000 * previous + i, numel)));
          EXPECT_TRUE(at::equal(received[2 * i + 1], iota(5000 * next + i, numel)));
        }
      }
      group.barrier(kHere);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Ways, testing::Values(Way::network, Way::shared_memory),
                         [](const auto& info) { return info.param == Way::network ? "Network" : "SharedMemory"; });

TEST(Peers, AreRefusedWhereAChannelWasNotMadeForThem) {
  run_ranks(2, [](const World& world) {
    const auto host = Host::find(world, "host", true);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
    EXPECT_ANY_THROW(group.send(iota(0, 4), 1 - world.rank));
    Group peers(world, Team::whole(world), "peers",
                {.timeout = kLong, .board = board_of(world), .host = host, .peers = PeerTraffic::yes});
    EXPECT_ANY_THROW(peers.send(iota(0, 4), world.rank)) << "to itself";
  });
}

}  // namespace
}  // namespace deeptide::comm::team_test
