// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors between neighbours, as a pipeline's stages exchange them: any shape, many at once, in both directions.
#include "comm/mailbox.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <numeric>

#include "on_hosts.h"

namespace deeptide::comm {
namespace {

using at::Tensor;
using std::chrono::milliseconds;

const Site kWaiting{"forward", "waiting for the stage before"};

/// By rank, its host; empty names: no two ranks share memory.
struct Spread {
  const char* name;
  std::vector<int> hosts;
};

/// The channel of one rank, and its mailbox.
struct Post {
  explicit Post(const World& world, milliseconds timeout = kLong, const std::optional<world::Mesh>& mesh = {})
      : board(board_of(world, mesh)),
        group(world, Team::whole(world), "peers",
              {.timeout = timeout,
               .board = board,
               .host = host::Host::find(world, "host", /*enabled=*/true, board),
               .peers = PeerTraffic::yes}),
        mailbox(group, at::kCPU) {}

  std::shared_ptr<world::FailureBoard> board;
  Group group;
  Mailbox mailbox;
};

const std::vector<std::vector<int64_t>> kShapes = {{}, {1}, {5}, {0}, {3, 0, 2}, {2, 3}, {4, 1, 5}, {2, 3, 4, 5}};

/// The letter number i from one rank to another.
Tensor letter(int from, int to, size_t i) {
  static constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kBool, at::kDouble};
  const auto& shape = kShapes[i % kShapes.size()];
  const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  return at::arange(numel, at::kLong)
      .add(100 * from + 10 * to + static_cast<int64_t>(i))
      .view(shape)
      .to(kTypes[i % std::size(kTypes)]);
}

class Mailboxes : public testing::TestWithParam<Spread> {
 protected:
  int size() const { return static_cast<int>(GetParam().hosts.size()); }
  void run(const RankMain& rank_main) const { run_on_hosts(GetParam().hosts, rank_main); }
};

TEST_P(Mailboxes, CarryTensorsOfAnyShapeAndTypeBetweenAllRanksAtOnce) {
  constexpr size_t kLetters = 48;  // per pair and direction: each shape with each type
  run([&](const World& world) {
    Post post(world);
    std::vector<std::vector<Mailbox::Letter>> coming(static_cast<size_t>(size()));
    for (int peer = 0; peer < size(); ++peer) {
      for (size_t i = 0; peer != world.rank && i < kLetters; ++i) {
        const bool told = i % 3 != 0;
        const Tensor own = letter(world.rank, peer, i), theirs = letter(peer, world.rank, i);
        told ? post.mailbox.send_told(own, peer) : post.mailbox.send_known(own, peer);
        coming[peer].push_back(told ? post.mailbox.receive_told(peer)
                                    : post.mailbox.receive_known(at::empty_like(theirs), peer));
      }
    }
    for (int peer = size() - 1; peer >= 0; --peer) {
      for (size_t i = 0; i < coming[peer].size(); ++i) {
        const Tensor got = post.mailbox.wait(coming[peer][i], kWaiting), expected = letter(peer, world.rank, i);
        EXPECT_EQ(got.scalar_type(), expected.scalar_type());
        EXPECT_EQ(got.sizes(), expected.sizes());
        EXPECT_TRUE(at::equal(got, expected)) << "letter " << i << " from rank " << peer;
      }
    }
    post.mailbox.flush(kWaiting);
    EXPECT_EQ(post.mailbox.num_sends_under_way(), 0u);
    post.group.barrier(kWaiting);
  });
}

/// Neither waits in a send: each is already in its receive.
TEST_P(Mailboxes, ExchangeLargeTensorsInBothDirections) {
  run([&](const World& world) {
    Post post(world);
    const int next = (world.rank + 1) % size(), previous = (world.rank + size() - 1) % size();
    for (const int64_t numel : {8'192, 1'000'003}) {
      post.mailbox.send_told(at::full({numel}, world.rank + 0.5f), next);
      post.mailbox.send_told(at::full({numel}, world.rank + 0.25f), previous);
      auto forward = post.mailbox.receive_told(previous), backward = post.mailbox.receive_told(next);
      const Tensor first = post.mailbox.wait(backward, kWaiting), second = post.mailbox.wait(forward, kWaiting);
      EXPECT_TRUE(at::equal(first, at::full({numel}, next + 0.25f)));
      EXPECT_TRUE(at::equal(second, at::full({numel}, previous + 0.5f)));
      post.mailbox.flush(kWaiting);
    }
    post.group.barrier(kWaiting);
  });
}

/// Rank 0 has asked rank 1 first, who answers only once rank 0 has heard from rank 2.
TEST_P(Mailboxes, LetALaterLetterOfAnotherRankComeFirst) {
  if (size() < 3) return;
  run([&](const World& world) {
    Post post(world);
    const Tensor one = at::full({3}, 1.0f);
    if (world.rank == 0) {
      auto from_1 = post.mailbox.receive_told(1), from_2 = post.mailbox.receive_told(2);
      EXPECT_TRUE(at::equal(post.mailbox.wait(from_2, kWaiting), one));
      EXPECT_FALSE(post.mailbox.wait_for(from_1, milliseconds(1), kWaiting));
      post.mailbox.send_told(one, 1);
      while (!post.mailbox.wait_for(from_1, milliseconds(20), kWaiting)) continue;
      EXPECT_TRUE(at::equal(post.mailbox.wait(from_1, kWaiting), one));
    } else if (world.rank == 1) {
      post.mailbox.wait(post.mailbox.receive_told(0), kWaiting);
      post.mailbox.send_told(one, 0);
    } else if (world.rank == 2) {
      post.mailbox.send_told(one, 0);
    }
    post.mailbox.flush(kWaiting);
    post.group.barrier(kWaiting);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Mailboxes,
                         testing::Values(Spread{"Network2", {0, 1}}, Spread{"Network3", {0, 1, 2}},
                                         Spread{"SharedMemory2", {0, 0}}, Spread{"SharedMemory3", {0, 0, 0}},
                                         Spread{"TwoLevels", {0, 0, 1, 1}}, Spread{"Mixed", {0, 1, 1}}),
                         [](const auto& info) { return info.param.name; });

int64_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(Mailbox, StartsNoThreadPerTransfer) {
  Meeting meeting(2);
  run_on_hosts({0, 1}, [&](const World& world) {
    Post post(world);
    const int other = 1 - world.rank;
    const auto exchange = [&](int count) {
      std::vector<Mailbox::Letter> letters;
      for (int i = 0; i < count; ++i) letters.push_back(post.mailbox.receive_told(other));
      for (int i = 0; i < count; ++i) post.mailbox.send_told(at::full({7}, 1.0f), other);
      meeting.arrive();
      const int64_t threads = num_threads();
      meeting.arrive();
      for (auto& each : letters) post.mailbox.wait(each, kWaiting);
      post.mailbox.flush(kWaiting);
      meeting.arrive();
      return threads;
    };
    const int64_t few = exchange(1);
    EXPECT_EQ(exchange(100), few);
  });
}

TEST(Mailbox, NamesARankThatIsLost) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2}, {0, 0, 0}}) {
    Meeting meeting(2);
    run_on_hosts(hosts, [&](const World& world) {
      Post post(world, milliseconds(1500));
      post.group.barrier(kWaiting);
      if (world.rank == 1) return;  // whose letter never comes
      post.mailbox.send_told(at::full({3}, 1.0f), 1);
      try {
        post.mailbox.wait(post.mailbox.receive_told(1), kWaiting);
        ADD_FAILURE() << "received what nobody sent";
      } catch (const CommError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("no report from rank 1"), std::string::npos) << text;
        EXPECT_NE(text.find("forward, waiting for the stage before"), std::string::npos) << text;
      }
      meeting.arrive();  // both wait before one goes
    });
  }
}

TEST(Mailbox, WaitsForASlowSenderThoughAnotherRankHasEnded) {
  run_on_hosts({0, 0, 0}, [](const World& world) {
    Post post(world);
    Tensor tensor = letter(1, 0, 5);
    if (world.rank == 2) return post.board->report_end("has ended training");
    if (world.rank == 1) {
      std::this_thread::sleep_for(6 * world::kPollFailures);
      post.mailbox.send_known(tensor, 0);
      post.mailbox.flush(kWaiting);
    } else {
      const Tensor arrived = at::empty_like(tensor);
      post.mailbox.wait(post.mailbox.receive_known(arrived, 1), kWaiting);
      EXPECT_TRUE(at::equal(arrived, tensor));
    }
  });
}

TEST(Mailbox, RefusesWhatCannotTravel) {
  run_on_hosts({0, 0}, [](const World& world) {
    Post post(world);
    const int other = 1 - world.rank;
    EXPECT_THROW(post.mailbox.send_told(at::zeros({1}), world.rank), c10::ValueError) << "to itself";
    EXPECT_THROW(post.mailbox.receive_told(world.rank), c10::ValueError);
    EXPECT_THROW(post.mailbox.send_known(at::zeros({1}), 2), c10::ValueError);
    const std::vector<int64_t> many(Mailbox::kMostDims + 1, 1);
    EXPECT_THROW(post.mailbox.send_told(at::zeros(many), other), c10::ValueError);
  });
}

TEST(Mailbox, RefusesWhatDoesNotTellOfATensorByTheRanksCoordinates) {
  run_on_hosts({0, 0}, [](const World& world) {
    Post post(world, kLong, world::Mesh(2, {2, 1, 1, 1, 1}));
    const int other = 1 - world.rank;
    post.mailbox.send_known(at::zeros({128}, at::kByte), other);
    try {
      post.mailbox.wait(post.mailbox.receive_told(other), kWaiting);
      ADD_FAILURE() << "took zeros for a shape";
    } catch (const CommError& error) {
      const std::string names[] = {"rank 0 (pipeline 0, data 0)", "rank 1 (pipeline 1, data 0)"};
      const std::string expected =
          names[world.rank] + " received from " + names[other] + " what does not tell of a tensor";
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
    post.mailbox.flush(kWaiting);
    post.group.barrier(kWaiting);
  });
}

}  // namespace
}  // namespace deeptide::comm
