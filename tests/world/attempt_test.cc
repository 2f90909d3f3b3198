// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Attempts of one job over one store, which keeps what earlier attempts have left.
#include "world/attempt.h"

#include <gtest/gtest.h>

#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/text.h"

namespace deeptide::world {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kLong{20'000}, kShort{300};

StorePtr hash_store() { return c10::make_intrusive<c10d::HashStore>(); }

/// A rank that joins, leaves its name where its attempt's ranks see it, and returns the name that rank 0 left.
std::future<std::string> join(const StorePtr& store, int rank, int size, const std::string& process,
                              milliseconds timeout = kLong) {
  return std::async(std::launch::async, [=]() -> std::string {
    try {
      const StorePtr own = join_attempt(store, rank, size, timeout, process);
      EXPECT_FALSE(own->check({"from/" + std::to_string(rank)})) << "an earlier attempt's key";
      own->set("from/" + std::to_string(rank), to_bytes(process));
      own->wait({"from/0"}, timeout);
      return to_text(own->get("from/0"));
    } catch (const std::exception& error) {
      return error.what();
    }
  });
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

TEST(Attempt, SeesNoKeyOfAnEarlierOne) {
  const StorePtr store = hash_store();
  for (const std::string attempt : {"first", "second", "third"}) {
    std::vector<std::future<std::string>> ranks;
    for (int rank = 0; rank < 3; ++rank) ranks.push_back(join(store, rank, 3, attempt + std::to_string(rank)));
    for (auto& rank : ranks) EXPECT_EQ(rank.get(), attempt + "0");
  }
}

TEST(Attempt, OfOneRankIsNewToo) {
  const StorePtr store = hash_store();
  EXPECT_EQ(join(store, 0, 1, "first").get(), "first");
  EXPECT_EQ(join(store, 0, 1, "second").get(), "second");
}

TEST(Attempt, FollowsOneInWhichARankNeverCame) {
  const StorePtr store = hash_store();
  auto abandoned = join(store, 0, 3, "old 0", kShort);
  auto answered = join(store, 1, 3, "old 1", kShort);
  expect_in(abandoned.get(), {"rank 0 waited", "rank 2 to join this attempt"});
  expect_in(answered.get(), {"rank 1 reached the agent's store, but not all ranks came"});
  // Both come before rank 0: one answers the old attempt for the first time, the other finds its predecessor's answer.
  auto one = join(store, 1, 3, "new 1"), two = join(store, 2, 3, "new 2");
  store->wait({"deeptide/attempt/old 0/rank/2"}, kLong);
  auto zero = join(store, 0, 3, "new 0");
  EXPECT_EQ(zero.get(), "new 0");
  EXPECT_EQ(one.get(), "new 0");
  EXPECT_EQ(two.get(), "new 0");
}

TEST(Attempt, MayChangeItsSize) {
  const StorePtr store = hash_store();
  for (const int size : {3, 2, 4}) {
    std::vector<std::future<std::string>> ranks;
    const std::string name = "of " + std::to_string(size) + ", ";
    for (int rank = 0; rank < size; ++rank) ranks.push_back(join(store, rank, size, name + std::to_string(rank)));
    for (auto& rank : ranks) EXPECT_EQ(rank.get(), name + "0");
  }
}

TEST(Attempt, IsTheSameForAProcessThatJoinsTwice) {
  const StorePtr store = hash_store();
  for (int time = 0; time < 2; ++time) {
    auto one = std::async(std::launch::async, [&] { return join_attempt(store, 1, 2, kLong, "b"); });
    const StorePtr zero = join_attempt(store, 0, 2, kLong, "a");
    EXPECT_EQ(zero->check({"seen"}), time == 1);
    one.get()->set("seen", to_bytes("x"));
  }
}

TEST(Attempt, FindsTwoProcessesOfOneRank) {
  const StorePtr store = hash_store();
  auto zero = join(store, 0, 2, "host:1");
  EXPECT_EQ(join(store, 1, 2, "host:2").get(), "host:1");
  EXPECT_EQ(zero.get(), "host:1");
  expect_in(join(store, 1, 2, "host:3", kShort).get(), {"two processes claim rank 1: host:2 and host:3", "of its own"});
}

TEST(Attempt, SaysThatRankZeroDidNotCome) {
  expect_in(join(hash_store(), 1, 2, "host:2", kShort).get(), {"rank 1 reached the agent's store, but rank 0 did not"});
}

}  // namespace
}  // namespace deeptide::world
