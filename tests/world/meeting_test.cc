// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks that meet with and without a token, and those that should not be there.
#include "world/meeting.h"

#include <gtest/gtest.h>

#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace deeptide::world {
namespace {

using c10d::Store;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<Store>;

constexpr milliseconds kLong{20'000}, kShort{300};

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// The end of each rank's meeting: "" or its error.
std::vector<std::string> meet_all(const StorePtr& store, const std::vector<std::string>& tokens,
                                  milliseconds timeout = kLong, std::vector<int> ranks = {}, int size = 0) {
  std::vector<std::future<std::string>> ends;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int rank = ranks.empty() ? static_cast<int>(i) : ranks[i];
    const int world = size > 0 ? size : static_cast<int>(tokens.size());
    ends.push_back(std::async(std::launch::async, [&store, &tokens, i, rank, world, timeout]() -> std::string {
      try {
        const StorePtr own = meet(store, rank, world, tokens[i], timeout);
        own->set("from/" + std::to_string(rank), bytes_of("x"));
        std::vector<std::string> keys;
        for (int other = 0; other < world; ++other) keys.push_back("from/" + std::to_string(other));
        own->wait(keys, timeout);
        return "";
      } catch (const std::exception& error) {
        return error.what();
      }
    }));
  }
  std::vector<std::string> texts;
  for (auto& end : ends) texts.push_back(end.get());
  return texts;
}

StorePtr hash_store() { return c10::make_intrusive<c10d::HashStore>(); }

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

TEST(Meeting, LetsRanksOfOneJobFindEachOther) {
  for (const int size : {1, 2, 4}) {
    for (const char* token : {"", "secret"}) {
      const auto texts = meet_all(hash_store(), std::vector<std::string>(size, token));
      for (const std::string& text : texts) EXPECT_EQ(text, "") << size << " ranks, token " << token;
    }
  }
}

TEST(Meeting, RefusesARankWithAnotherToken) {
  const auto texts = meet_all(hash_store(), {"secret", "guess"}, kShort);
  expect_in(texts[1], {"rank 1 (this process) and rank 0 hold different job tokens", "DEEPTIDE_JOB_TOKEN"});
  expect_in(texts[0], {"rank 0 waited", "missing: rank 1"});
}

TEST(Meeting, RefusesARankWithoutTheTokenAndTheOtherWayRound) {
  expect_in(meet_all(hash_store(), {"secret", ""}, kShort)[1], {"rank 0 expects the job's token"});
  expect_in(meet_all(hash_store(), {"", "secret"}, kShort)[1],
            {"rank 1 (this process) holds a job's token, but rank 0 has none"});
}

TEST(Meeting, RefusesAForeignerWhoSignsInWithoutAProof) {
  const StorePtr store = hash_store();
  store->set("deeptide/rank/1", bytes_of("evil:1 0123456789abcdef"));
  const auto texts = meet_all(store, {"secret", "secret"}, kShort);
  expect_in(texts[0], {"rank 1 (evil:1) did not prove the job's token and is refused"});
  expect_in(texts[1], {"two processes claim rank 1: evil:1 and "});
}

TEST(Meeting, TellsTheOthersWhoWasRefused) {
  const StorePtr store = hash_store();
  store->set("deeptide/rank/2", bytes_of("evil:1 open"));
  const auto texts = meet_all(store, {"secret", "secret"}, kShort, {0, 1}, 3);
  expect_in(texts[1], {"rank 2 (evil:1) did not prove the job's token"});
}

TEST(Meeting, DoesNotTakeAForeignersHello) {
  const StorePtr store = hash_store();
  store->set("deeptide/hello", bytes_of("2 00 1111"));
  for (const std::string& text : meet_all(store, {"secret", "secret"}, kShort)) {
    expect_in(text, {"hold different job tokens"});
  }
}

/// None before torch 2.10, whose stores list no keys.
template <typename Store>
std::vector<std::string> keys_of(Store& store) {
  if constexpr (requires { store.listKeys(); }) return store.listKeys();
  return {};
}

TEST(Meeting, KeepsLaterKeysUnderAPrefixThatNobodyElseKnows) {
  const StorePtr store = hash_store();
  ASSERT_EQ(meet_all(store, {"secret", "secret"})[0], "");
  EXPECT_FALSE(store->check({"from/0"}));
  for (const std::string& key : keys_of(*store)) EXPECT_EQ(key.find("secret"), std::string::npos) << key;
}

TEST(Meeting, FindsTwoProcessesOfOneRank) {
  const StorePtr store = hash_store();
  store->set("deeptide/rank/1", bytes_of("elsewhere:77 open"));
  expect_in(meet_all(store, {"", ""}, kShort)[1], {"two processes claim rank 1: elsewhere:77 and ", "its own rank"});
}

TEST(Meeting, LetsAProcessMeetTwice) {
  const StorePtr store = hash_store();
  for (const char* token : {"", "secret"}) {
    const StorePtr own = c10::make_intrusive<c10d::HashStore>();
    EXPECT_EQ(meet_all(own, {token, token}), meet_all(own, {token, token}));
    EXPECT_EQ(meet_all(own, {token, token})[1], "");
  }
}

TEST(Meeting, TellsWorldsOfDifferentSizesApart) {
  const StorePtr store = hash_store();
  meet(store, 0, 2, "", kShort);
  try {
    meet(store, 1, 4, "", kShort);
    FAIL() << "expected an error";
  } catch (const ConfigError& error) {
    expect_in(error.what(), {"rank 1 (this process) was started in a world of 4, but rank 0 in one of 2"});
  }
}

TEST(Meeting, SaysThatRankZeroNeverCame) {
  try {
    meet(hash_store(), 1, 2, "", kShort);
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    expect_in(error.what(), {"rank 1 reached the store, but rank 0 did not answer"});
  }
}

TEST(Meeting, WorksOverARealConnection) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = kLong;
  const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  options.port = server->getPort();
  options.isServer = false;
  std::vector<std::future<std::string>> ends;
  for (int rank = 0; rank < 3; ++rank) {
    ends.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
      try {
        const auto client = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
        meet(client, rank, 3, "secret", kLong)->set("done/" + std::to_string(rank), bytes_of("x"));
        return "";
      } catch (const std::exception& error) {
        return error.what();
      }
    }));
  }
  for (auto& end : ends) EXPECT_EQ(end.get(), "");
}

}  // namespace
}  // namespace deeptide::world
