// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finding the world from the environment, and the board on which ranks leave word.
#include "deeptide/world.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "world/failure_board.h"

namespace deeptide {
namespace {

using std::chrono::milliseconds;

constexpr const char* kVariables[] = {"RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "TORCHELASTIC_RUN_ID",
                                      "TORCHELASTIC_USE_AGENT_STORE",
                                      "PMI_RANK",
                                      "PMI_SIZE",
                                      "DEEPTIDE_JOB_TOKEN"};

/// Sets the variables that describe a world, all others unset; restores on destruction.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    for (const char* name : kVariables) {
      const char* before = std::getenv(name);
      before_[name] = before ? std::optional<std::string>(before) : std::nullopt;
      ::unsetenv(name);
    }
    for (const auto& [name, value] : values) ::setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  ~Environment() {
    for (const auto& [name, value] : before_) {
      value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
    }
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

/// A port on which no process listens at the moment.
std::string free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(socket);
  if (!bound) throw std::runtime_error("no free port");
  return std::to_string(ntohs(address.sin_port));
}

std::string error_with(const std::map<std::string, std::string>& values) {
  const Environment environment(values);
  try {
    init_distributed({.timeout = milliseconds(1000)});
  } catch (const ConfigError& error) {
    return error.what();
  } catch (const CommError& error) {
    return std::string("CommError: ") + error.what();
  }
  return "none";
}

TEST(World, IsOneRankWhenTheEnvironmentSaysNothing) {
  const Environment environment({});
  const World world = init_distributed();
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.size, 1);
  EXPECT_EQ(world.source, "single");
  ASSERT_TRUE(world.store);
  EXPECT_EQ(world.store->add("counter", 2), 2);
}

TEST(World, IsOneRankWithoutAConnectionUnderMpirunOfOne) {
  const Environment environment({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  EXPECT_EQ(init_distributed().source, "single");
}

TEST(World, ProvesTheTokenToItself) {
  const Environment environment({{"RANK", "0"},
                                 {"WORLD_SIZE", "1"},
                                 {"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", free_port()},
                                 {"DEEPTIDE_JOB_TOKEN", "secret"}});
  const World world = init_distributed({.timeout = milliseconds(5000)});
  EXPECT_EQ(world.source, "deeptide");
  EXPECT_EQ(world.store->add("counter", 2), 2);
}

TEST(World, IsOneRankWhenOnlyAnAddressIsSet) {
  const Environment environment({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(init_distributed().source, "single");
}

TEST(World, ReadsTheLaunchersAndTorchrunsVariables) {
  std::map<std::string, std::string> values{{"RANK", "0"},
                                            {"WORLD_SIZE", "1"},
                                            {"LOCAL_RANK", "3"},
                                            {"MASTER_ADDR", "127.0.0.1"},
                                            {"MASTER_PORT", free_port()}};
  {
    const Environment environment(values);
    const World world = init_distributed({.timeout = milliseconds(5000)});
    EXPECT_EQ(world.local_rank, 3);
    EXPECT_EQ(world.source, "environment");
    EXPECT_EQ(world.store->add("counter", 2), 2);
  }
  values["TORCHELASTIC_RUN_ID"] = "none";
  values["MASTER_PORT"] = free_port();
  const Environment environment(values);
  EXPECT_EQ(init_distributed({.timeout = milliseconds(5000)}).source, "torchrun");
}

TEST(World, SaysWhenTheRanksCannotMeetAtAPort) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto busy = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const std::string port = std::to_string(busy->getPort());
  const std::string text =
      error_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  EXPECT_EQ(text.find("CommError: rank 0 cannot listen at port " + port + ", where the ranks meet"), 0u) << text;
}

TEST(World, SaysWhereTheStoreWasSoughtInVain) {
  const std::string port = free_port();
  const std::string text =
      error_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  EXPECT_EQ(text.find("CommError: rank 1 could not reach the store at 127.0.0.1:" + port + " within 1 s"), 0u) << text;
}

/// Both ranks of a world, as threads that say themselves who they are.
std::vector<World> meet(const std::string& init_method) {
  const Environment environment({});
  std::vector<World> worlds(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      worlds[rank] = init_distributed(
          {.timeout = milliseconds(20'000), .init_method = init_method, .rank = rank, .world_size = 2});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return worlds;
}

TEST(World, MeetsAtAnAddressOrInAFile) {
  const std::string path = testing::TempDir() + "deeptide-meeting-" + std::to_string(::getpid());
  for (const std::string& method : {"tcp://127.0.0.1:" + free_port(), "file://" + path}) {
    const auto worlds = meet(method);
    worlds[0].store->set("word", std::vector<uint8_t>{7});
    EXPECT_EQ(worlds[1].store->get("word"), std::vector<uint8_t>{7}) << method;
    EXPECT_EQ(worlds[1].source, "arguments");
  }
  EXPECT_FALSE(std::filesystem::exists(path)) << "the last rank removes it";
}

TEST(World, ValidatesTheConfigurationAndTheBackend) {
  const Environment environment({});
  EXPECT_THROW(init_distributed({.config = "/no/such/ds_config.json"}), ConfigError);
  EXPECT_THROW(init_distributed({.dist_backend = "nccl"}), ConfigError);
  EXPECT_EQ(init_distributed({.dist_backend = "gloo"}).source, "single");
}

TEST(World, RejectsARankOutsideItsSize) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& [rank, size] : {std::pair{2, 2}, {-1, 2}, {0, 0}}) {
    EXPECT_THROW(make_world(store, rank, size), ConfigError) << rank << " of " << size;
  }
  EXPECT_EQ(make_world(store, 1, 2).local_rank, 1);
}

class Board : public testing::Test {
 protected:
  World world(int rank, int size = 3) { return make_world(store_, rank, size); }
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(Board, IsEmptyWhileAllIsWell) {
  world::FailureBoard board(world(0), "a");
  EXPECT_EQ(board.failure(), std::nullopt);
}

TEST_F(Board, TellsEveryRankWhoFailed) {
  world::FailureBoard one(world(1), "a"), other(world(2), "a"), another_engine(world(0), "b");
  one.report_failure("failed in forward");
  EXPECT_EQ(other.failure(), "rank 1 failed in forward");
  EXPECT_EQ(another_engine.failure(), std::nullopt);
}

TEST_F(Board, TellsApartWhoWaitsAndWhoNeverCame) {
  world::FailureBoard zero(world(0), "a"), two(world(2), "a");
  EXPECT_EQ(zero.diagnose("waits: at x"), "no report from rank 1, 2");
  EXPECT_EQ(two.diagnose("waits: at y"), "no report from rank 1; rank 0: waits: at x");
  world::FailureBoard one(world(1), "a");
  EXPECT_EQ(one.diagnose("waits: at z"), "every rank is waiting; rank 0: waits: at x; rank 2: waits: at y");
}

TEST_F(Board, AsksARankThatWaitsForItsPlace) {
  world::FailureBoard zero(world(0), "a"), two(world(2), "a");
  EXPECT_EQ(zero.failure("waits: at x"), std::nullopt);
  std::thread waiting([&] {
    while (zero.failure("waits: at x") == std::nullopt) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  const std::string seen = two.diagnose("lost a peer");
  two.report_failure("has ended");
  waiting.join();
  EXPECT_EQ(seen, "no report from rank 1; rank 0: waits: at x");
}

TEST_F(Board, SaysWhatEndedARankThatEndsForAnother) {
  world::FailureBoard one(world(1), "a"), two(world(2), "a");
  one.note_cause("no report from rank 0; rank 2: waits");
  one.note_cause("rank 2 has ended training");
  one.report_failure("has ended training at step 1");
  EXPECT_EQ(two.failure(), "rank 1 has ended training at step 1, having seen: no report from rank 0; rank 2: waits");
}

TEST_F(Board, NamesWhoIsStillSilentBesideARankThatEndedForSilence) {
  world::FailureBoard zero(world(0), "a"), two(world(2), "a");
  two.note_cause(two.diagnose("waits: at y"));
  two.report_failure("has ended");
  EXPECT_EQ(zero.failure(), "rank 2 has ended, having seen: no report from rank 0, 1; by now no report from rank 1");
}

/// The words that a board without any grace adds to an error.
constexpr const char* kNotGoneOn = R"(, and has not gone on within 0 s ("deeptide": {"error_grace": seconds}))";

TEST_F(Board, TellsOfAnErrorUntilTheRankGoesOn) {
  world::FailureBoard one(world(1), "a"), two(world(2), "a"), hasty(world(0), "a", milliseconds(0));
  one.report_error("raised ValueError in forward", "out of luck\nat line 3");
  const std::string text = "rank 1 raised ValueError in forward: out of luck";
  EXPECT_EQ(two.error(), text);
  EXPECT_EQ(hasty.failure(), text + kNotGoneOn);
  EXPECT_TRUE(hasty.is_failure());
  EXPECT_EQ(two.failure("waits: at x"), std::nullopt) << "within the grace";
  EXPECT_FALSE(two.is_failure());
  EXPECT_EQ(one.error(), std::nullopt) << "its own";
  one.report_error("raised KeyError in forward", "");
  EXPECT_EQ(hasty.failure(), std::string("rank 1 raised KeyError in forward") + kNotGoneOn) << "the later one";
  one.withdraw_error();
  EXPECT_EQ(two.error(), std::nullopt);
  EXPECT_EQ(hasty.failure(), std::nullopt);
  EXPECT_FALSE(hasty.is_failure());
  EXPECT_FALSE(store_->check({"a/place/2"})) << "a later diagnosis would take it for a wait of that moment";
}

TEST_F(Board, HearsNothingOfAForkedChild) {
  const std::string path = testing::TempDir() + "deeptide-board-" + std::to_string(::getpid());
  const auto shared = [&](int rank) {
    World own = world(rank);
    own.store = c10::make_intrusive<c10d::FileStore>(path, 3);
    return own;
  };
  world::FailureBoard one(shared(1), "a"), two(shared(2), "a", milliseconds(0));
  const auto in_child = [](const std::function<void()>& run) {
    const pid_t child = ::fork();
    if (child == 0) {
      run();
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  };
  in_child([&] {
    one.report_error("raised ValueError in step", "process 2 was forked from process 1");
    one.report_end("has ended training at step 1");
    one.report_failure("failed in step");
  });
  EXPECT_EQ(two.failure(), std::nullopt);
  EXPECT_FALSE(two.has_ended(1));
  one.report_error("raised KeyError in forward", "");
  in_child([&] { one.withdraw_error(); });
  EXPECT_EQ(two.failure(), std::string("rank 1 raised KeyError in forward") + kNotGoneOn);
  std::filesystem::remove(path);
}

TEST_F(Board, GivesEachErrorAGraceOfItsOwn) {
  const milliseconds grace(50);
  world::FailureBoard one(world(1), "a"), two(world(2), "a", grace);
  for (int i = 0; i < 2; ++i) {
    one.report_error("raised ValueError in forward", "out of luck");
    EXPECT_EQ(two.failure(), std::nullopt) << "seen for the first time";
    std::this_thread::sleep_for(grace);
    EXPECT_NE(two.failure(), std::nullopt);
    one.withdraw_error();
    EXPECT_EQ(two.failure(), std::nullopt);
  }
}

TEST_F(Board, NamesTheEarliestErrorThatStands) {
  world::FailureBoard zero(world(0), "a"), one(world(1), "a"), two(world(2), "a");
  for (int i = 0; i < 2; ++i) {
    one.report_error("raised ValueError in forward", "out of luck");
    zero.report_error("raised KeyError in step", "'lr'");
    EXPECT_EQ(two.error(), "rank 1 raised ValueError in forward: out of luck");
    one.withdraw_error();
    EXPECT_EQ(two.error(), "rank 0 raised KeyError in step: 'lr'");
    EXPECT_EQ(one.error(), "rank 0 raised KeyError in step: 'lr'");
    zero.withdraw_error();
    EXPECT_EQ(two.error(), std::nullopt);
  }
}

TEST_F(Board, PutsAnErrorBeforeAnEndInGoodOrderAndBehindAFailure) {
  world::FailureBoard zero(world(0), "a", milliseconds(0)), one(world(1), "a"), two(world(2), "a");
  two.report_end("has ended training at step 3");
  one.report_error("raised ValueError in forward", "out of luck");
  EXPECT_EQ(zero.failure(), std::string("rank 1 raised ValueError in forward: out of luck") + kNotGoneOn);
  two.report_failure("failed in initialize");
  EXPECT_EQ(zero.failure(), "rank 2 failed in initialize");
}

TEST_F(Board, TellsTheErrorThatARankEndsWith) {
  world::FailureBoard zero(world(0), "a"), one(world(1), "a");
  EXPECT_FALSE(zero.has_ended(1));
  one.report_error("raised ValueError in forward", "out of luck");
  EXPECT_FALSE(zero.has_ended(1));
  one.report_end("has ended training at step 1");
  EXPECT_TRUE(zero.has_ended(1));
  EXPECT_EQ(zero.failure(), "rank 1 raised ValueError in forward: out of luck, and has ended training at step 1");
}

TEST_F(Board, TakesAnErrorOfARankThatHasLostItsPeersForItsFailure) {
  world::FailureBoard one(world(1), "a"), two(world(2), "a");
  one.note_cause("rank 0's process 4711 has ended");
  one.report_error("raised CommError in step", "rank 1 lost its peers at step 1");
  EXPECT_EQ(two.failure(), "rank 1 raised CommError in step, having seen: rank 0's process 4711 has ended");
  one.withdraw_error();
  EXPECT_TRUE(two.is_failure()) << "its groups are unusable: it cannot go on";
}

TEST_F(Board, SpreadsACauseThatOneRankKnows) {
  world::FailureBoard one(world(1), "a"), two(world(2), "a");
  const std::string cause = "rank 0's process 4711 has ended";
  int looks = 0;  // it is found a moment later
  EXPECT_EQ(one.diagnose("waits: at x", [&] { return ++looks < 3 ? std::nullopt : std::optional(cause); }), cause);
  EXPECT_TRUE(one.is_reachable());
  EXPECT_EQ(two.diagnose("waits: at y"), cause) << "not what rank 2 sees: who is silent";
}

TEST_F(Board, WritesNothingInAWorldOfOne) {
  world::FailureBoard alone(world(0, 1), "a");
  alone.report_failure("has ended");
  alone.report_error("raised ValueError in forward", "out of luck");
  EXPECT_EQ(store_->getNumKeys(), 0);
}

/// A store whose host has gone.
class DeadStore : public c10d::HashStore {
 public:
  void set(const std::string&, const std::vector<uint8_t>&) override { throw std::runtime_error("connection reset"); }
  bool check(const std::vector<std::string>&) override { throw std::runtime_error("connection reset"); }
};

TEST(FailureBoard, NeverThrowsWhenTheStoreIsGone) {
  world::FailureBoard board(make_world(c10::make_intrusive<DeadStore>(), 1, 2), "a");
  board.report_failure("has ended");
  board.report_error("raised ValueError in forward", "out of luck");
  board.withdraw_error();
  const std::string lost = "rank 0 has probably ended, perhaps because another rank did: see its error";
  EXPECT_EQ(board.failure(), "the store is unreachable (connection reset); " + lost);
  EXPECT_EQ(board.error(), std::nullopt);
  EXPECT_EQ(board.diagnose("waits"), "the store is unreachable; " + lost);
  int looks = 0;  // it is found a moment later
  const auto find = [&] { return ++looks < 3 ? std::nullopt : std::optional<std::string>("rank 2 has ended"); };
  EXPECT_EQ(board.diagnose("waits", find), "rank 2 has ended");
  EXPECT_FALSE(board.is_reachable());
}

}  // namespace
}  // namespace deeptide
