// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts what crosses which link, and names the slow one; several network devices at once.
#include "comm/transport/link_times.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <vector>

#include "comm/group.h"
#include "on_hosts.h"

namespace deeptide::comm {
namespace {

using at::Tensor;

constexpr int64_t kMega = 1 << 20;
const Site kTimed{"forward", "gathering unit 'h.3'"};

/// `count` samples of one rate, in bytes/s.
void add(LinkTimes& links, int from, int count, double rate, int64_t bytes = kMega) {
  for (int i = 0; i < count; ++i) links.add_sample(from, bytes, static_cast<double>(bytes) / rate);
}

TEST(LinkTimes, KnowNothingBeforeEnoughHasCome) {
  LinkTimes links;
  links.add_sent(3, 100);
  links.add_received(3, 50);
  add(links, 3, 23, 1e6);
  links.add_sample(3, 50, 0.0);  // no time has passed
  EXPECT_EQ(links.facts().slow_from, -1);
  EXPECT_EQ(links.facts().rate, 0.0f);
  EXPECT_EQ(links.sent_bytes(), 100);
  EXPECT_EQ(links.uses().at(3).received_bytes, 50);
  add(links, 3, 1, 1e6);
  EXPECT_EQ(links.facts().slow_from, 3);
  EXPECT_FLOAT_EQ(links.facts().rate, 1e6f);
  EXPECT_EQ(links.facts().rate_of_others, 0.0f);
}

TEST(LinkTimes, TellTheSlowestByWhatItCanDo) {
  LinkTimes links;
  for (const int rank : {1, 2, 3}) {
    add(links, rank, 5, rank == 2 ? 1e6 : 1.5e6);  // shared with many other rows
    add(links, rank, 24, rank == 2 ? 5e6 : 1e7);
    add(links, rank, 1, 3e8);  // a burst, or a thread that woke up late
    add(links, rank, 2, 1e3);  // a process that stood still
  }
  const LinkFacts facts = links.facts();
  EXPECT_EQ(facts.slow_from, 2);
  EXPECT_FLOAT_EQ(facts.rate, 5e6f);
  EXPECT_FLOAT_EQ(facts.rate_of_others, 1e7f);
}

TEST(LinkTimes, ForgetWhatIsLongPast) {
  LinkTimes links;
  add(links, 1, 300, 1e7);
  add(links, 1, 128, 2e6);
  EXPECT_FLOAT_EQ(links.facts().rate, 2e6f);
}

TEST(LinkTimes, BlameNoLinkWhoseTransfersAreTooShortToTime) {
  LinkTimes links;
  add(links, 1, 32, 1e10, 100'000);  // 10 us
  EXPECT_EQ(links.facts().slow_from, -1);
  EXPECT_FLOAT_EQ(links.facts().rate, 1e10f) << "which others may be compared with";
}

TEST(LinkTimes, LeaveOutTheRanksOfOneHost) {
  LinkTimes links({0, 1});
  links.add_sent(1, 100);
  links.add_received(1, 100);
  add(links, 1, 32, 1e6);
  EXPECT_TRUE(links.uses().empty());
  EXPECT_EQ(links.facts().rate, 0.0f);
}

TEST(SlowLink, IsTheSlowestOfAllIfTheOthersAreFaster) {
  EXPECT_FALSE(find_slow_link({}));
  EXPECT_FALSE(find_slow_link({{}, {}})) << "nothing is known";
  EXPECT_FALSE(find_slow_link({{.slow_from = 1, .rate = 5e6f}, {}})) << "with nothing to compare it with";
  const auto two = find_slow_link({{.slow_from = 1, .rate = 9e6f}, {.slow_from = 0, .rate = 5e6f}});
  ASSERT_TRUE(two);
  EXPECT_EQ(two->to, 1U);
  EXPECT_FLOAT_EQ(static_cast<float>(two->others), 9e6f);
  EXPECT_FALSE(find_slow_link({{.slow_from = 1, .rate = 5e6f}, {.slow_from = 0, .rate = 6.5e6f}})) << "even";
  // Nobody can be blamed where transfers were too short, but links may be compared with theirs.
  EXPECT_FALSE(find_slow_link({{.slow_from = -1, .rate = 5e6f}, {.slow_from = 0, .rate = 9e6f}}));
  EXPECT_TRUE(find_slow_link({{.slow_from = 1, .rate = 5e6f}, {.slow_from = -1, .rate = 9e6f}}));
}

TEST(SlowLink, OfAHostThatSendsOrReceivesSlowlyIsFoundAmongItsOwn) {
  const float slow = 5e6f, fast = 1e7f;
  const LinkFacts even{.slow_from = 2, .rate = fast, .rate_of_others = fast};
  const LinkFacts from_first{.slow_from = 0, .rate = slow, .rate_of_others = fast};
  const auto sends = find_slow_link({even, from_first, from_first});
  ASSERT_TRUE(sends);
  EXPECT_EQ(sends->to, 1U);
  EXPECT_FLOAT_EQ(static_cast<float>(sends->others), fast);
  const auto receives = find_slow_link({{.slow_from = 1, .rate = slow, .rate_of_others = slow}, even, even});
  ASSERT_TRUE(receives);
  EXPECT_EQ(receives->to, 0U);
  EXPECT_FLOAT_EQ(static_cast<float>(receives->others), fast);
}

TEST(LateRank, ComputesForLongerThanTheOthersByATenthOfAStep) {
  EXPECT_FALSE(find_late_rank({{.computing_s = 1.0f}}, 1.0));
  EXPECT_FALSE(find_late_rank({{.computing_s = 1.0f}, {.computing_s = 1.0f}}, 1.0));
  EXPECT_FALSE(find_late_rank({{.computing_s = 0.9f}, {.computing_s = 1.0f}}, 1.5));
  const auto late = find_late_rank({{.computing_s = 0.5f}, {.computing_s = 0.25f}, {.computing_s = 2.0f}}, 2.0);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 2U);
  EXPECT_FLOAT_EQ(static_cast<float>(late->others_s), 0.5f);
}

/// A group whose links are counted, as gathers and reductions of an engine.
struct Counted {
  Counted(const World& world, std::shared_ptr<host::Host> host)
      : links(std::make_shared<LinkTimes>()),
        group(world, Team::whole(world), "test",
              {.timeout = kLong, .board = board_of(world), .host = std::move(host), .links = links}) {}

  std::shared_ptr<LinkTimes> links;
  Group group;
};

TEST(LinkTimes, CountsWhatEachPairOfHostsExchanges) {
  run_on_hosts({0, 1, 2}, [&](const World& world) {
    Counted counted(world, nullptr);
    constexpr int64_t n = 1000;
    const Tensor all = at::empty({3 * n}), rows = at::arange(3 * n, at::kFloat), received = at::empty({3 * n});
    auto gather = counted.group.all_gather(all, rows.narrow(0, 0, n));
    auto exchange = counted.group.all_to_all(received, rows);
    counted.group.wait(gather, kTimed);
    counted.group.wait(exchange, kTimed);
    for (int peer = 0; peer < 3; ++peer) {
      const LinkUse use = counted.links->uses()[peer];
      const int64_t expected = peer == world.rank ? 0 : 2 * 4 * n;
      EXPECT_EQ(use.sent_bytes, expected) << "to rank " << peer;
      EXPECT_EQ(use.received_bytes, expected) << "from rank " << peer;
    }
    EXPECT_EQ(counted.links->sent_bytes(), counted.group.sent_bytes());
  });
}

/// Every rank of a host carries its part of what the host sends, to the rank of its index on the other.
TEST(LinkTimes, ShowsTwoLevelsSpreadOverAllRanksOfAHost) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 0, 1, 1}, {0, 1, 0, 1}}) {
    run_on_hosts(hosts, [&](const World& world) {
      auto host = host::Host::find(world, "host", true);
      Counted counted(world, host);
      ASSERT_STREQ(counted.group.path(), "two levels");
      constexpr int64_t n = 1000;
      const Tensor all = at::empty({4 * n}), rows = at::arange(4 * n, at::kFloat), received = at::empty({4 * n});
      auto gather = counted.group.all_gather(all, rows.narrow(0, 0, n));
      counted.group.wait(gather, kTimed);
      auto exchange = counted.group.all_to_all(received, rows);
      counted.group.wait(exchange, kTimed);
      const int peer = host->hosts()[1 - host->host_index()][host->index()];
      const auto uses = counted.links->uses();
      ASSERT_EQ(uses.size(), 1U);
      EXPECT_EQ(uses.begin()->first, peer);
      // One row of two ranks' gathered ones; of four rows, those for the two ranks of the other host.
      EXPECT_EQ(uses.begin()->second.sent_bytes, 4 * (n + 2 * n));
      EXPECT_EQ(uses.begin()->second.received_bytes, 4 * (n + 2 * n));
    });
  }
}

/// GLOO_SOCKET_IFNAME while it lives.
class Interfaces {
 public:
  explicit Interfaces(const char* names) {
    if (const char* before = std::getenv(kName)) before_ = before;
    ::setenv(kName, names, 1);
  }
  ~Interfaces() { before_ ? ::setenv(kName, before_->c_str(), 1) : ::unsetenv(kName); }

 private:
  static constexpr const char* kName = "GLOO_SOCKET_IFNAME";
  std::optional<std::string> before_;
};

TEST(SeveralDevices, ShareWhatARankSends) {
  const Interfaces interfaces("lo,lo,lo");
  run_on_hosts({0, 1, 2}, [&](const World& world) {
    Counted counted(world, nullptr);
    for (const int64_t n : {int64_t{1}, int64_t{0}, int64_t{65'537}, int64_t{150'000}, int64_t{700'001}}) {
      const Tensor all = at::empty({3 * n}), received = at::empty({3 * n});
      const Tensor own = at::arange(n, at::kFloat) + world.rank;
      auto gather = counted.group.all_gather(all, own);
      auto exchange = counted.group.all_to_all(received, own.repeat({3}));
      counted.group.wait(gather, kTimed);
      counted.group.wait(exchange, kTimed);
      for (int64_t peer = 0; peer < 3; ++peer) {
        const Tensor expected = at::arange(n, at::kFloat) + peer;
        EXPECT_TRUE(at::equal(all.narrow(0, peer * n, n), expected)) << n << " elements of rank " << peer;
        EXPECT_TRUE(at::equal(received.narrow(0, peer * n, n), expected)) << n << " elements of rank " << peer;
      }
    }
    EXPECT_EQ(counted.links->sent_bytes(), counted.group.sent_bytes());
  });
}

TEST(SeveralDevices, OfWhichOneIsUnknownAreAnErrorThatNamesTheVariable) {
  const Interfaces interfaces("lo,nothere0");
  const auto errors = errors_of_ranks(2, [](World world) {
    world.host = "host " + std::to_string(world.rank);
    const Counted counted(world, nullptr);
  });
  for (const auto& error : errors) {
    EXPECT_NE(error.find("GLOO_SOCKET_IFNAME"), std::string::npos) << error;
    EXPECT_NE(error.find("nothere0"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace deeptide::comm
