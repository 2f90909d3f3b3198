// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives through shared memory, and host by host: bit for bit what c10d gives and what a sum in rank order is.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/transport/ordered_rows.h"
#include "comm/transport/transport.h"
#include "on_hosts.h"
#include "processes.h"

namespace deeptide::comm {
namespace {

using at::ScalarType;
using at::Tensor;
using std::chrono::milliseconds;

constexpr int64_t kSlot = 256 << 10;  // of the transport, in bytes
const Site kHere{"step", "testing"};
constexpr ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kByte};

constexpr int64_t kPeriod = 4099;  // a prime: what lands in a wrong place shows

/// Equal on every rank for equal arguments.
Tensor values(int64_t rank, int64_t numel, ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + rank));
  const int64_t drawn = std::min(numel, kPeriod);
  const Tensor some = dtype == at::kByte ? at::randint(0, 256, {drawn}, generator, at::kByte)
                                         : at::randn({drawn}, generator, at::kDouble).to(dtype);
  return drawn == numel ? some : some.repeat({numel / kPeriod + 1}).narrow(0, 0, numel).contiguous();
}

/// a[0] + a[1] + …, element by element, as the contract states: computed here, in fp32 where the type is narrower.
template <typename Sum>
Tensor sum_by_hand(const std::vector<Tensor>& rows) {
  const Tensor total = at::empty(rows[0].sizes(), c10::CppTypeToScalarType<Sum>::value);
  for (int64_t i = 0; i < total.numel(); ++i) {
    Sum sum = rows[0][i].item<Sum>();
    for (size_t r = 1; r < rows.size(); ++r) sum = static_cast<Sum>(sum + rows[r][i].item<Sum>());
    total.mutable_data_ptr<Sum>()[i] = sum;
  }
  return total.to(rows[0].scalar_type());
}

Tensor expected_sum(int rank, int size, int64_t numel, ScalarType dtype) {
  std::vector<Tensor> rows;
  for (int peer = 0; peer < size; ++peer)
    rows.push_back(values(peer, size * numel, dtype).narrow(0, rank * numel, numel));
  if (dtype == at::kByte) return sum_by_hand<uint8_t>(rows);
  return dtype == at::kDouble ? sum_by_hand<double>(rows) : sum_by_hand<float>(rows);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::equal(a.view(at::kByte), b.view(at::kByte));
}

/// All four, started together.
struct Results {
  Results(Group& group, int64_t rank, int64_t size, int64_t numel, ScalarType dtype)
      : gathered(at::full({size * numel}, 1, dtype)),
        exchanged(gathered.clone()),
        reduced(at::full({numel}, 1, dtype)),
        sent(values(rank, numel, dtype)) {
    auto a = group.all_gather(gathered, values(rank, numel, dtype));
    auto b = group.all_to_all(exchanged, values(rank, size * numel, dtype));
    auto c = group.reduce_scatter(reduced, values(rank, size * numel, dtype));
    auto d = group.broadcast(sent, static_cast<int>(numel % size));
    // Not in the order in which they began.
    for (auto* pending : {&c, &a, &d, &b}) group.wait(*pending, kHere);
  }
  Tensor gathered, exchanged, reduced, sent;
};

void check_places(const Results& results, int64_t rank, int64_t size, int64_t numel, ScalarType dtype) {
  const auto where = [&] {
    return ::testing::Message() << size << " ranks, " << numel << " of " << c10::toString(dtype);
  };
  for (int64_t peer = 0; peer < size; ++peer) {
    EXPECT_TRUE(same_bits(results.gathered.narrow(0, peer * numel, numel), values(peer, numel, dtype))) << where();
    EXPECT_TRUE(same_bits(results.exchanged.narrow(0, peer * numel, numel),
                          values(peer, size * numel, dtype).narrow(0, rank * numel, numel)))
        << where();
  }
  EXPECT_TRUE(same_bits(results.sent, values(numel % size, numel, dtype))) << where();
}

void check_all(Group& group, const World& world, int64_t numel, ScalarType dtype, bool sums) {
  const Results results(group, world.rank, world.size, numel, dtype);
  check_places(results, world.rank, world.size, numel, dtype);
  if (!sums) return;
  EXPECT_TRUE(same_bits(results.reduced, expected_sum(world.rank, world.size, numel, dtype)))
      << world.size << " ranks, " << numel << " of " << c10::toString(dtype);
}

class Worlds : public testing::TestWithParam<int> {};

void check_every_type_and_size(const World& world) {
  const auto host = host::Host::find(world, "host", true);
  Group group(world, Team::whole(world), "shared", {.timeout = kLong, .board = board_of(world), .host = host});
  for (const ScalarType dtype : kTypes) {
    for (const int64_t numel : {0, 1, 2, 3, 127}) check_all(group, world, numel, dtype, true);
  }
}

TEST_P(Worlds, MoveAndAddEveryTypeAndSizeThroughSharedMemory) { run_ranks(GetParam(), check_every_type_and_size); }

TEST_P(Worlds, DoSoAsProcesses) {
  RankProcesses ranks(GetParam(), [](const World& world) {
    check_every_type_and_size(world);
    TORCH_CHECK(!HasFailure(), "what this process has printed");
  });
  for (const auto& outcome : ranks.wait(std::chrono::seconds(60))) {
    EXPECT_TRUE(outcome.ended_in_time);
    EXPECT_EQ(outcome.error, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Worlds, testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

class Slots : public testing::TestWithParam<int> {};

TEST_P(Slots, HoldWhatFitsAndTakeTurnsWithTheRest) {
  run_ranks(GetParam(), [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    Group group(world, Team::whole(world), "shared", {.timeout = kLong, .board = board_of(world), .host = host});
    for (const ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const int64_t slot = kSlot / static_cast<int64_t>(c10::elementSize(dtype));
      for (const int64_t numel : {slot - 1, slot, slot + 1}) {
        if (world.size < 4 || numel > slot) check_all(group, world, numel, dtype, false);
      }
      check_all(group, world, slot / world.size + 1, dtype, false);
    }
    check_all(group, world, 5 * kSlot + 77, at::kByte, false);                        // more than all slots
    if (world.size == 2) check_all(group, world, 17 * kSlot + 77, at::kByte, false);  // past the cache, every one
  });
}

INSTANTIATE_TEST_SUITE_P(Of, Slots, testing::Values(2, 3, 8));

/// Ranks by host, and the transport that they must then choose.
struct Layout {
  std::vector<int> hosts;
  const char* text;
};

class Layouts : public testing::TestWithParam<Layout> {};

TEST_P(Layouts, GiveTheBitsOfPlainC10d) {
  const Layout& layout = GetParam();
  run_on_hosts(layout.hosts, [&](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    EXPECT_EQ(host->text(), layout.text);
    const auto board = board_of(world);
    Group group(world, Team::whole(world), "by host", {.timeout = kLong, .board = board, .host = host}),
        flat(world, Team::whole(world), "flat", {.timeout = kLong, .board = board});
    for (const ScalarType dtype : kTypes) {
      for (const int64_t numel : {0, 1, 5, 130}) {
        const Results results(group, world.rank, world.size, numel, dtype);
        check_places(results, world.rank, world.size, numel, dtype);
        const Tensor rows = at::empty({world.size * numel}, dtype), sum = at::empty({numel}, dtype);
        auto pending = flat.all_to_all(rows, values(world.rank, world.size * numel, dtype));
        flat.wait(pending, kHere);
        EXPECT_TRUE(same_bits(results.exchanged, rows));
        add_rows_in_order(rows.view({world.size, numel}).unbind(0), sum);
        EXPECT_TRUE(same_bits(sum, expected_sum(world.rank, world.size, numel, dtype)));
        // Only c10d itself, where no two ranks share memory in a regular way, adds in an order of its own.
        if (host->is_uniform() && host->size() > 1) {
          EXPECT_TRUE(same_bits(results.reduced, sum));
        }
      }
    }
    const int64_t numel = kSlot / 4 + 3;
    check_all(group, world, numel, at::kFloat, false);
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, Layouts,
                         testing::Values(Layout{{0, 0, 1, 1}, "2 hosts of 2 ranks, shared memory within"},
                                         Layout{{0, 1, 0, 1}, "2 hosts of 2 ranks, shared memory within"},
                                         Layout{{0, 0, 0, 1, 1, 1}, "2 hosts of 3 ranks, shared memory within"},
                                         Layout{{0, 1, 2, 0, 1, 2}, "3 hosts of 2 ranks, shared memory within"},
                                         Layout{{0, 0, 0}, "1 host of 3 ranks, shared memory"},
                                         Layout{{0, 1, 2}, "no two ranks share memory, network"},
                                         Layout{{0, 0, 0, 1}, "2 hosts of 3 and 1 ranks, network"}));

class Outstanding : public testing::TestWithParam<std::vector<int>> {};

TEST_P(Outstanding, OperationsEndInTheirOrderWhicheverIsWaitedFor) {
  run_on_hosts(GetParam(), [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
    const int64_t numel = kSlot / 4 + 1;
    std::vector<Tensor> outputs;
    std::vector<Pending> pending;
    for (int i = 0; i < 12; ++i) {
      outputs.push_back(at::empty({world.size * numel}));
      pending.push_back(group.all_gather(outputs.back(), at::full({numel}, static_cast<float>(100 * i + world.rank))));
    }
    group.wait(pending.back(), kHere);
    for (int i = 0; i < 12; ++i) {
      EXPECT_TRUE(pending[i].ready()) << i;
      for (int peer = 0; peer < world.size; ++peer) {
        EXPECT_TRUE(at::equal(outputs[i].narrow(0, peer * numel, numel), at::full({numel}, 100.0f * i + peer))) << i;
      }
    }
    { const auto nobody_waits = group.all_gather(outputs[0], at::full({numel}, -1.0f)); }
    group.barrier(kHere);
    for (int i = 0; i < 200; ++i) group.barrier(kHere);
    EXPECT_TRUE(at::equal(outputs[0], at::full({world.size * numel}, -1.0f))) << "it was done before what came after";
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, Outstanding, testing::Values(std::vector<int>{0, 0, 0}, std::vector<int>{0, 1, 0, 1}));

TEST(HostTransport, GathersIntoTheBufferThatHoldsTheInput) {
  run_ranks(3, [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
    const int64_t numel = kSlot + 5;
    const Tensor whole = at::full({3 * numel}, -1, at::kByte);
    const Tensor own = whole.narrow(0, world.rank * numel, numel);
    own.fill_(world.rank);
    auto pending = group.all_gather(whole, own);
    group.wait(pending, kHere);
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(at::equal(whole.narrow(0, peer * numel, numel), at::full({numel}, peer, at::kByte)));
    }
  });
}

TEST(HostTransport, LetsGoOfItsTensorsWhenItIsDone) {
  for (const auto& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    run_on_hosts(hosts, [](const World& world) {
      const auto host = host::Host::find(world, "host", true);
      Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
      const Tensor output = at::empty({world.size * 7}), input = at::full({7}, 1.0f);
      auto pending = group.all_gather(output, input);
      group.wait(pending, kHere);
      for (int i = 0; i < 2; ++i) group.barrier(kHere);
      EXPECT_EQ(output.use_count(), 1);
      EXPECT_EQ(input.use_count(), 1);
    });
  }
}

TEST(Group, RefusesTensorsThatDoNotFitTheContract) {
  run_ranks(2, [](const World& world) {
    const auto host = host::Host::find(world, "host", true);
    Group group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world), .host = host});
    const Tensor square = at::full({4, 4}, 1.0f);
    EXPECT_ANY_THROW(group.all_gather(at::empty({32}), square.t())) << "not contiguous";
    EXPECT_ANY_THROW(group.all_gather(at::empty({16}), square)) << "too small";
    EXPECT_ANY_THROW(group.all_gather(at::empty({32}, at::kDouble), square)) << "of another type";
    EXPECT_ANY_THROW(group.all_to_all(at::empty({3}), at::empty({3}))) << "no multiple of the world";
    EXPECT_ANY_THROW(group.reduce_scatter(at::empty({16}), square));
    EXPECT_ANY_THROW(group.broadcast(square.t(), 0));
    group.barrier(kHere);
  });
}

}  // namespace
}  // namespace deeptide::comm
