// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The link between launcher and ranks under a starter: who gets in, what is asked over it, and what cuts it.
#include "launch/wire/rank_hub.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>

#include "launch/launched.h"
#include "launch/system/payload.h"
#include "launch/wire/hub_link.h"

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kToken = "0123456789abcdef0123456789abcdef";

RankHello hello_of(int rank, int world_size = 2) { return {DEEPTIDE_VERSION, rank, world_size, rank, "node"}; }

std::string port_of(const RankHub& hub) { return hub.address().substr(0, hub.address().find(',')); }

/// A rank's end as `deeptide rank` has it, which answers each question with one state.
class Rank {
 public:
  Rank(int rank, const std::string& at, const std::string& token, const RankHello& hello)
      : link_(at, token, encode(hello),
              {[this, rank](const StateQuestion& question) { answer(rank, question); }, [] {}}) {}

  void late(double waited_s) { link_.send(FrameKind::late, encode(Late{waited_s})); }
  HubLink& link() { return link_; }

 private:
  void answer(int rank, const StateQuestion& question) {
    RankState state;
    state.rank = rank;
    state.pid = 1000 + rank;
    state.process = 'S';
    state.newest["reductions"] = {static_cast<uint64_t>(5 - rank), "all-to-all"};
    if (rank == 0) state.waiting = CollectiveState{"all-to-all", "reductions", "backward", "h", "", 7, 0, 5, 12.0};
    if (!question.stacks_of.empty()) state.stacks = "stack of rank " + std::to_string(rank) + "\n";
    link_.send(FrameKind::states, encode(StateAnswer{question.id, {state}}));
  }

  HubLink link_;
};

/// Launcher and ranks in one loop.
class Link : public ::testing::Test {
 protected:
  Link() {
    signal(SIGPIPE, SIG_IGN);
    hub_.serve(kToken, watch_);
  }

  ~Link() override {
    for (const int socket : strangers_) close(socket);
  }

  Rank& add(int rank, const std::string& token = kToken) { return add(rank, token, hello_of(rank)); }
  Rank& add(int rank, const std::string& token, const RankHello& hello) {
    std::string at = hub_.address();
    at.insert(at.find(','), ",no-address");  // which it gets over
    return *ranks_.emplace_back(std::make_unique<Rank>(rank, at, token, hello));
  }

  /// Somebody who knows the port.
  int add_stranger(const std::string& says) {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(port_of(hub_))));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(send(socket, says.data(), says.size(), MSG_NOSIGNAL), static_cast<ssize_t>(says.size()));
    strangers_.push_back(socket);
    return socket;
  }

  /// True if the hub has hung up.
  static bool is_cut(int socket) {
    char buffer[4096];
    ssize_t got = 0;
    while ((got = recv(socket, buffer, sizeof buffer, MSG_DONTWAIT)) > 0) said_to_stranger += std::string(buffer, got);
    return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }

  bool serve_until(const std::function<bool()>& done, milliseconds limit = seconds(10)) {
    for (const auto end = Clock::now() + limit; !done();) {
      if (Clock::now() >= end) return false;
      PollSet set;
      hub_.add_to(set);
      watch_.add_to(set);
      for (const auto& rank : ranks_) rank->link().add_to(set);
      set.wake_by(Clock::now() + milliseconds(20));
      set.wait();
      hub_.check();
      watch_.check();
      for (const auto& rank : ranks_) rank->link().check();
    }
    return true;
  }

  /// The words of `deeptide stacks` about the job now; a rank that is late makes the launcher say them.
  std::string report() {
    if (!serve_until([this] { return !reports_.empty(); })) return "";
    return reports_.front();
  }

  static std::string said_to_stranger;
  std::vector<std::string> reports_;
  RankHub hub_{std::vector<Host>{{"worker-1", {0}}, {"worker-2", {0}}}};
  HangWatch watch_{options(), getpid(), [this](const std::string& text) { reports_.push_back(text); }};
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<int> strangers_;

 private:
  static Options options() {
    Options made;
    made.hang_timeout_s = 10;
    made.command = {"train.py"};
    return made;
  }
};

std::string Link::said_to_stranger;

TEST_F(Link, RanksAreAskedOverItAndMergedIntoOneReport) {
  Rank& first = add(0);
  Rank& second = add(1);
  ASSERT_TRUE(serve_until([&] { return first.link().up() && second.link().up(); }));
  first.late(12.0);
  const std::string text = report();
  EXPECT_TRUE(has(text, "rank 1 on worker-2 ")) << text;
  EXPECT_TRUE(has(text, "rank 0 on worker-1 waiting for all-to-all 5")) << text;
  EXPECT_TRUE(has(text, "stack of rank 1")) << text;
  EXPECT_FALSE(has(text, "not connected")) << text;
  serve_until([] { return false; }, milliseconds(300));
  EXPECT_EQ(reports_.size(), 1u);
}

TEST_F(Link, RanksThatHaveNotComeOrHaveEndedAreNamed) {
  Rank& first = add(0, kToken, hello_of(0, 3));
  add(1, kToken, hello_of(1, 3));
  ASSERT_TRUE(serve_until([&] { return first.link().up() && ranks_[1]->link().up(); }));
  ranks_.pop_back();
  serve_until([] { return false; }, milliseconds(200));
  first.late(12.0);
  const std::string text = report();
  EXPECT_TRUE(has(text, "\nrank 1 on worker-2: ended\n")) << text;
  EXPECT_TRUE(has(text, "\nrank 2: not connected to the launcher")) << text;
}

/// A word that no rank says cuts the link, as a fault of the network would.
TEST_F(Link, ARankWhoseLinkBrokeComesBackInItsOwnPlace) {
  Rank& first = add(0);
  Rank& second = add(1);
  const auto both_up = [&] { return first.link().up() && second.link().up(); };
  ASSERT_TRUE(serve_until(both_up));
  second.link().send(FrameKind::states, "no answer");
  ASSERT_TRUE(serve_until([&] { return !second.link().up(); }));
  ASSERT_TRUE(serve_until(both_up));
  serve_until([] { return false; }, milliseconds(200));  // the hub has read the hello
  first.late(12.0);
  const std::string text = report();
  EXPECT_TRUE(has(text, "rank 1 on worker-2 ")) << text;
  EXPECT_TRUE(has(text, "stack of rank 1")) << text;
  EXPECT_FALSE(has(text, "ended")) << text;
  EXPECT_FALSE(has(text, "not connected")) << text;
}

/// A fault that only the rank has noticed lies before this.
TEST_F(Link, ARankThatComesBackReplacesItsOlderLink) {
  add(1);
  ASSERT_TRUE(serve_until([&] { return ranks_[0]->link().up(); }));
  Rank& again = add(1);
  Rank& first = add(0);
  ASSERT_TRUE(serve_until([&] { return again.link().up() && first.link().up() && !ranks_[0]->link().up(); }));
  first.late(12.0);
  const std::string text = report();
  EXPECT_TRUE(has(text, "stack of rank 1")) << text;
  EXPECT_EQ(text.find("rank 1 on worker-2"), text.rfind("rank 1 on worker-2 is ")) << text;
}

TEST_F(Link, AWrongTokenIsNoRankAndLearnsNothing) {
  Rank& intruder = add(1, "fedcba9876543210fedcba9876543210");
  Rank& first = add(0);
  ASSERT_TRUE(serve_until([&] { return first.link().up(); }));
  first.late(12.0);
  EXPECT_TRUE(has(report(), "\nrank 1: not connected to the launcher"));
  EXPECT_FALSE(intruder.link().up());
}

TEST_F(Link, GarbageIsCutOffAtOnce) {
  const auto since = Clock::now();
  const int stranger = add_stranger(std::string(100'000, 'x'));
  EXPECT_TRUE(serve_until([&] { return is_cut(stranger); }));
  EXPECT_LT(Clock::now() - since, seconds(3));
}

TEST_F(Link, SilenceAndAHalfProofAreCutOffAfterFiveSeconds) {
  const auto since = Clock::now();
  const int silent = add_stranger("");
  const int half = add_stranger(std::string(100, 'a'));
  Rank& rank = add(0);  // who is let in meanwhile
  ASSERT_TRUE(serve_until([&] { return rank.link().up(); }, seconds(3)));
  EXPECT_FALSE(is_cut(silent));
  EXPECT_TRUE(serve_until([&] { return is_cut(silent) && is_cut(half); }));
  EXPECT_GE(Clock::now() - since, seconds(4));
  EXPECT_TRUE(rank.link().up());
}

/// A rank that knows the token may still say something wrong.
TEST_F(Link, WhatIsNoWordOfARankCutsItsLink) {
  const std::string port = port_of(hub_);
  struct Wrong {
    FrameKind kind;
    std::string payload;
  };
  const Wrong wrongs[] = {{FrameKind::states, "no answer"},
                          {FrameKind::late, "{\"waited\": \"long\"}"},
                          {FrameKind::hello, encode(hello_of(0))},  // a second time
                          {FrameKind::states, std::string(5 << 20, 'x')}};
  for (const Wrong& wrong : wrongs) {
    RankHub hub({});
    HangWatch watch(Options{}, getpid(), [](const std::string&) {});
    hub.serve(kToken, watch);
    HubLink rank(hub.address(), kToken, encode(hello_of(0)), {[](const auto&) {}, [] {}});
    bool was_up = false;
    const auto end = Clock::now() + seconds(10);
    while (Clock::now() < end && !(was_up && !rank.up())) {
      PollSet set;
      hub.add_to(set);
      rank.add_to(set);
      set.wake_by(Clock::now() + milliseconds(20));
      set.wait();
      hub.check();
      rank.check();
      if (rank.up() && !was_up) rank.send(wrong.kind, wrong.payload);
      was_up = was_up || rank.up();
    }
    EXPECT_TRUE(was_up);
    EXPECT_FALSE(rank.up()) << static_cast<int>(wrong.kind);
  }
}

TEST_F(Link, AnotherVersionIsNotTakenIn) {
  RankHello other = hello_of(1);
  other.version = "0.0.0";
  add(1, kToken, other);
  Rank& first = add(0);
  ASSERT_TRUE(serve_until([&] { return first.link().up(); }));
  ASSERT_TRUE(serve_until([&] { return !ranks_[0]->link().up(); }));
  first.late(12.0);
  EXPECT_TRUE(has(report(), "\nrank 1: not connected to the launcher"));
}

/// One half of a link on a socket pair, the other end in the test's hands.
class OneEnd : public ::testing::Test {
 protected:
  OneEnd() {
    signal(SIGPIPE, SIG_IGN);
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0);
    link_ = std::make_unique<TokenLink>(ends_[0], TokenLink::End::rank, kToken,
                                        [this](const Frame& frame) { frames_.push_back(frame); });
  }
  ~OneEnd() override { close(ends_[1]); }

  std::string hear() {
    PollSet set;
    link_->add_to(set);
    set.wake_by(Clock::now() + milliseconds(20));
    set.wait();
    link_->check();
    char buffer[4096];
    const ssize_t got = recv(ends_[1], buffer, sizeof buffer, MSG_DONTWAIT);
    return got > 0 ? std::string(buffer, got) : "";
  }
  void say(const std::string& text) {
    ASSERT_EQ(send(ends_[1], text.data(), text.size(), MSG_NOSIGNAL), ssize_t(text.size()));
  }

  int ends_[2] = {-1, -1};
  std::unique_ptr<TokenLink> link_;
  std::vector<Frame> frames_;
};

TEST_F(OneEnd, ItsOwnProofGivenBackIsNone) {
  const auto end = Clock::now() + seconds(3);
  while (!link_->closed() && Clock::now() < end) {
    const std::string heard = hear();
    if (!heard.empty()) say(heard);
  }
  EXPECT_TRUE(link_->closed());
  EXPECT_FALSE(link_->proved());
}

TEST_F(OneEnd, FramesCountAfterTheProofAndMayComeInHalves) {
  int others[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, others), 0);
  TokenLink launcher(others[0], TokenLink::End::launcher, kToken, [](const Frame&) {});
  const auto end = Clock::now() + seconds(3);
  while (!(link_->proved() && launcher.proved()) && Clock::now() < end) {  // we carry what they say
    const std::string heard = hear();
    if (!heard.empty()) {
      ASSERT_GT(send(others[1], heard.data(), heard.size(), MSG_NOSIGNAL), 0);
    }
    PollSet set;
    launcher.add_to(set);
    set.wake_by(Clock::now() + milliseconds(20));
    set.wait();
    char buffer[4096];
    const ssize_t got = recv(others[1], buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) say(std::string(buffer, got));
  }
  close(others[1]);
  ASSERT_TRUE(link_->proved());
  const std::string bytes = encode({FrameKind::ask, -1, "question"});
  say(bytes.substr(0, 7));
  for (int i = 0; i < 5; ++i) hear();
  EXPECT_TRUE(frames_.empty());
  EXPECT_FALSE(link_->closed());
  say(bytes.substr(7));
  for (int i = 0; i < 5; ++i) hear();
  ASSERT_EQ(frames_.size(), 1u);
  EXPECT_EQ(frames_[0].payload, "question");
  say(std::string("\xff\xff\xff\xff", 4));  // a frame of 4 GiB
  for (int i = 0; i < 5; ++i) hear();
  EXPECT_TRUE(link_->closed());
}

}  // namespace
}  // namespace deeptide::launch
