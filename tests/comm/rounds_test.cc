// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Words in which ranks say how far they are.
#include "comm/rounds.h"

#include <gtest/gtest.h>

#include <variant>

#include "on_hosts.h"

namespace deeptide::comm {
namespace {

const Site kCollecting{"step", "collecting a round"};

void go_round(Rounds& rounds, const Word& word) {
  rounds.post(word);
  rounds.collect(kCollecting);
}

// A pass that began before a close must not learn of reductions after it: those that wait would send half a sum.
TEST(Rounds, ForgetAtACloseWhatWasAnnounced) {
  run_ranks(2, [](const World& world) {
    Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board_of(world)});
    Rounds rounds(control);
    if (world.rank == 0) rounds.announce(1);
    go_round(rounds, Wishes{});
    EXPECT_EQ(rounds.most_announced(), 1);

    if (world.rank == 0) rounds.announce(2);
    go_round(rounds, Close{});
    EXPECT_EQ(rounds.most_announced(), 0);
    go_round(rounds, Wishes{});
    EXPECT_EQ(rounds.most_announced(), 0);
  });
}

// The rank that tells something may wait for what the other one does then, and post nothing before.
TEST(Rounds, TellWhatIsAnnouncedBehindAWordUnderWay) {
  run_ranks(2, [](const World& world) {
    Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board_of(world)});
    Rounds rounds(control);
    rounds.post(Wishes{});
    if (world.rank == 0) {
      rounds.announce(1);
      EXPECT_TRUE(rounds.is_untold());
      rounds.post_behind(Wishes{});
      EXPECT_FALSE(rounds.is_untold());
    }
    rounds.collect(kCollecting);
    EXPECT_EQ(rounds.most_announced(), 0);
    EXPECT_EQ(rounds.posted(), world.rank == 0);
    if (world.rank == 1) rounds.post(Close{});
    const auto words = rounds.collect(kCollecting);
    EXPECT_EQ(rounds.most_announced(), 1);
    EXPECT_TRUE(std::holds_alternative<Wishes>(words.at(0)));
    EXPECT_TRUE(std::holds_alternative<Close>(words.at(1)));
    EXPECT_FALSE(rounds.posted());
    EXPECT_EQ(rounds.count(), 2);
  });
}

// A host that waits for its device answers nobody, so nobody may ask between closes.
TEST(Rounds, OfAlikeWishesAskNobodyUntilAClose) {
  run_ranks(2, [](const World& world) {
    Group control(world, Team::whole(world), "control", {.timeout = kLong, .board = board_of(world)});
    Rounds rounds(control);
    rounds.take_wishes_as_alike();
    rounds.note_reductions(3, 3);
    for (int round = 0; world.rank == 0 && round < 2; ++round) {  // the other rank makes none
      Wishes own{.num_needs = 1};
      own.units[0] = 4 + round;
      rounds.post(own);
      EXPECT_TRUE(rounds.ready());
      const auto words = rounds.collect(kCollecting);
      ASSERT_EQ(words.size(), 2U);
      for (const Word& word : words) EXPECT_EQ(std::get<Wishes>(word).units[0], 4 + round);
      EXPECT_EQ(rounds.launched_by_all(), 3);
    }
    rounds.post(Close{.rounds = 10 + world.rank});
    const auto closes = rounds.collect(kCollecting);
    EXPECT_EQ(std::get<Close>(closes.at(0)).rounds, 10);
    EXPECT_EQ(std::get<Close>(closes.at(1)).rounds, 11);
  });
}

}  // namespace
}  // namespace deeptide::comm
