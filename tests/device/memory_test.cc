// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Flat memory is aligned, zeroed and counted to the last byte; pools lend a buffer once at a time.
#include "device/memory/memory.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/sanitizers.h"

namespace deeptide::device {
namespace {

using at::Tensor;

constexpr int64_t kLarge = 2 << 20;

uintptr_t address(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); }

class FlatMemory : public testing::TestWithParam<int64_t> {};

TEST_P(FlatMemory, IsZeroAlignedWritableAndCountedUntilItsLastReferenceGoes) {
  const auto ledger = std::make_shared<Ledger>();
  const int64_t numel = GetParam();
  {
    const Tensor flat = allocate_flat(ledger, Role::parameters, numel, at::kFloat, at::kCPU);
    EXPECT_EQ(flat.sizes(), at::IntArrayRef({numel}));
    EXPECT_EQ(address(flat) % (4 * numel >= kLarge ? kLarge : 4096), 0u);
    EXPECT_EQ(ledger->current(Role::parameters), 4 * numel);
    EXPECT_EQ(flat.count_nonzero().item<int64_t>(), 0);
    flat.fill_(1.5);
    EXPECT_EQ(flat.sum(at::kDouble).item<double>(), 1.5 * static_cast<double>(numel));
    const Tensor view = flat.narrow(0, 0, numel / 2);
    EXPECT_EQ(ledger->current(Role::parameters), 4 * numel) << "a view adds nothing";
  }
  EXPECT_EQ(ledger->current(Role::parameters), 0);
  EXPECT_EQ(ledger->peak(Role::parameters), 4 * numel);
}

INSTANTIATE_TEST_SUITE_P(Sizes, FlatMemory,
                         testing::Values(0, 1, 16, 1023, kLarge / 4 - 1, kLarge / 4, kLarge / 4 + 1, 3 * kLarge / 4));

TEST(FlatMemory, LivesAsLongAsAView) {
  const auto ledger = std::make_shared<Ledger>();
  Tensor view;
  {
    const Tensor flat = allocate_flat(ledger, Role::gathered, 1000, at::kBFloat16, at::kCPU);
    flat.fill_(3.0);
    view = flat.narrow(0, 990, 10);
  }
  EXPECT_EQ(ledger->current(Role::gathered), 2000);
  EXPECT_TRUE(view.eq(3.0).all().item<bool>());
  view.reset();
  EXPECT_EQ(ledger->current(Role::gathered), 0);
}

TEST(FlatMemory, OutlivesTheCallersLedger) {
  auto ledger = std::make_shared<Ledger>();
  const std::weak_ptr<Ledger> watched = ledger;
  Tensor flat = allocate_flat(ledger, Role::gradients, 10, at::kFloat, at::kCPU);
  ledger.reset();
  EXPECT_FALSE(watched.expired());
  flat.reset();
  EXPECT_TRUE(watched.expired());
}

#ifndef DEEPTIDE_SANITIZED  // shadow memory bounds mappings otherwise
TEST(FlatMemory, NamesRoleAndBytesWhenThereIsNone) {
  const auto ledger = std::make_shared<Ledger>();
  constexpr int64_t kTooMuch = int64_t{1} << 48;
  try {
    allocate_flat(ledger, Role::optimizer, kTooMuch, at::kFloat, at::kCPU);
    FAIL() << "mapped a petabyte";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("optimizer states"), std::string::npos) << text;
    EXPECT_NE(text.find(std::to_string(4 * kTooMuch)), std::string::npos) << text;
    EXPECT_NE(text.find("more ranks"), std::string::npos) << text;
  }
  EXPECT_EQ(ledger->current(Role::optimizer), 0);
  EXPECT_EQ(ledger->peak(Role::optimizer), 0) << "what was never had is no peak";
}
#endif

TEST(Ledger, RefusesWhatItsCapDoesNotHoldAndSaysWhoHoldsIt) {
  const auto ledger = std::make_shared<Ledger>(10'000);
  ledger->set_advice([] { return std::string("A shorter model frees 1 byte."); });
  const Tensor states = allocate_flat(ledger, Role::optimizer, 1024, at::kFloat, at::kCPU);
  Tensor parameters = allocate_flat(ledger, Role::parameters, 5904, at::kByte, at::kCPU);
  try {
    allocate_flat(ledger, Role::gradients, 1, at::kByte, at::kCPU);
    FAIL() << "took a byte more than the cap";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what();
    for (const char* part : {"1 bytes for gradients", "10001 bytes", "device_memory_cap", "is 10000",
                             "4.0 KiB of optimizer states", "5.8 KiB of parameters", "A shorter model frees 1 byte."}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
    }
  }
  EXPECT_EQ(ledger->peak(Role::gradients), 0);
  parameters.reset();
  EXPECT_EQ(allocate_flat(ledger, Role::gradients, 5904, at::kByte, at::kCPU).numel(), 5904);
}

TEST(Ledger, KeepsRolesApartAndRemembersPeaks) {
  Ledger ledger;
  ledger.add(Role::gradients, 100);
  ledger.add(Role::gathered, 30);
  ledger.add(Role::gradients, -60);
  ledger.add(Role::gradients, 20);
  EXPECT_EQ(ledger.current(Role::gradients), 60);
  EXPECT_EQ(ledger.peak(Role::gradients), 100);
  EXPECT_EQ(ledger.peak(Role::gathered), 30);
  EXPECT_EQ(ledger.peak(Role::communication), 0);
}

TEST(Ledger, CountsFromManyThreads) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        ledger.add(Role::communication, 8);
        if (i % 2) ledger.add(Role::communication, -8);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ledger.current(Role::communication), 4 * 500 * 8);
}

TEST(Ledger, NamesEveryRole) {
  std::set<std::string> names;
  for (int i = 0; i < kNumRoles; ++i) names.insert(role_name(static_cast<Role>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kNumRoles));
}

class Pool : public testing::Test {
 protected:
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  BufferPool pool_{ledger_, Role::gathered, at::kCPU};
};

TEST_F(Pool, GivesTheSameMemoryAgainForAnyTypeThatFits) {
  Tensor first = pool_.take(1000, at::kFloat);
  const auto where = address(first);
  pool_.put(std::move(first));
  Tensor second = pool_.take(1500, at::kBFloat16);
  EXPECT_EQ(address(second), where);
  EXPECT_EQ(second.scalar_type(), at::kBFloat16);
  EXPECT_EQ(second.numel(), 1500);
  pool_.put(std::move(second));
  EXPECT_EQ(address(pool_.take(1000, at::kFloat)), where) << "given back whole, not as the part that was taken";
  EXPECT_EQ(ledger_->peak(Role::gathered), 4000);
}

TEST_F(Pool, TakesTheSmallestThatFits) {
  Tensor big = pool_.take(1600, at::kByte), small = pool_.take(1100, at::kByte);
  const auto where = address(small);
  pool_.put(std::move(big));
  pool_.put(std::move(small));
  EXPECT_EQ(address(pool_.take(1000, at::kByte)), where);
}

TEST_F(Pool, FreesWhatDoesNotFitALargeRequestInsteadOfAddingToThePeak) {
  pool_.put(pool_.take(1'000'000, at::kFloat));
  EXPECT_EQ(ledger_->current(Role::gathered), 4'000'000);
  const Tensor small = pool_.take(100, at::kFloat);
  EXPECT_EQ(ledger_->current(Role::gathered), 4'000'400)
      << "a small one costs nothing; the large one stays for the next";
  const Tensor large = pool_.take(2'000'000, at::kFloat);
  EXPECT_EQ(ledger_->current(Role::gathered), 8'000'400);
}

TEST_F(Pool, ReplacesIdleBuffersThatWouldGoBeyondItsMost) {
  pool_.keep_within(1000);
  pool_.put(pool_.take(100, at::kFloat));
  const Tensor small = pool_.take(150, at::kFloat);
  EXPECT_EQ(ledger_->current(Role::gathered), 1000) << "both, for they have room";
  pool_.take(200, at::kFloat);
  EXPECT_EQ(ledger_->peak(Role::gathered), 1400) << "the idle one went first";
}

TEST_F(Pool, NeverLendsOneBufferTwice) {
  const Tensor one = pool_.take(64, at::kFloat), other = pool_.take(64, at::kFloat);
  EXPECT_NE(address(one), address(other));
}

TEST_F(Pool, FreesADroppedBufferAndTrimsIdleOnes) {
  pool_.take(100, at::kFloat);
  EXPECT_EQ(ledger_->current(Role::gathered), 0);
  pool_.put(pool_.take(100, at::kFloat));
  EXPECT_EQ(ledger_->current(Role::gathered), 400);
  pool_.trim();
  EXPECT_EQ(ledger_->current(Role::gathered), 0);
}

TEST_F(Pool, TakesWhatItsForecastTakes) {
  PoolForecast forecast(/*max_waste=*/2);
  std::mt19937 random(7);
  std::deque<std::pair<Tensor, int64_t>> taken;
  for (int i = 0; i < 300; ++i) {
    const int64_t bytes = 100'000 * (1 + random() % 40);  // on both sides of what counts as large
    taken.emplace_back(pool_.take(bytes, at::kByte), forecast.take(bytes));
    while (!taken.empty() && random() % 5 < 2) {
      pool_.put(std::move(taken.front().first));
      forecast.put(taken.front().second);
      taken.pop_front();
    }
    EXPECT_EQ(ledger_->peak(Role::gathered), forecast.peak()) << "after " << i + 1 << " requests";
  }
}

TEST_F(Pool, MakesWhatIsReservedAtOnceAndServesAnyRequestThatItHolds) {
  pool_.reserve({100'000, 900'000});
  EXPECT_EQ(ledger_->current(Role::gathered), 0) << "not before the first request";
  EXPECT_TRUE(pool_.has(900'000, at::kByte));
  EXPECT_FALSE(pool_.has(900'001, at::kByte));
  Tensor small = pool_.take(10, at::kByte), next = pool_.take(20, at::kByte);
  EXPECT_EQ(ledger_->current(Role::gathered), 1'000'000) << "the second lies in the large one";
  EXPECT_FALSE(pool_.has(1, at::kByte));
  const auto large = address(next);
  pool_.put(std::move(next));
  EXPECT_EQ(address(pool_.take(800'000, at::kByte)), large);
}

TEST_F(Pool, KeepsWhatIsReservedBesideWhatElseIsNeeded) {
  pool_.reserve({500'000});
  Tensor reserved = pool_.take(500'000, at::kByte);
  const auto where = address(reserved);
  Tensor further = pool_.take(600'000, at::kByte);
  pool_.put(std::move(reserved));
  pool_.put(std::move(further));
  const Tensor larger = pool_.take(2'000'000, at::kByte);
  EXPECT_EQ(ledger_->current(Role::gathered), 2'500'000) << "a large request replaces what was not reserved";
  EXPECT_EQ(address(pool_.take(500'000, at::kByte)), where);
}

TEST_F(Pool, MakesWhatIsReservedAnewAfterItWasTrimmed) {
  pool_.reserve({500'000});
  pool_.put(pool_.take(1, at::kByte));
  pool_.trim();
  EXPECT_EQ(ledger_->current(Role::gathered), 0);
  EXPECT_TRUE(pool_.has(500'000, at::kByte));
  pool_.put(pool_.take(1, at::kByte));
  EXPECT_EQ(ledger_->current(Role::gathered), 500'000);
}

TEST(BufferPool, PromisesAgainWhatDidNotFit) {
  const auto ledger = std::make_shared<Ledger>(1'000'000);
  BufferPool pool(ledger, Role::communication, at::kCPU);
  pool.reserve({600'000, 600'000});
  EXPECT_THROW(pool.take(1, at::kByte), c10::OutOfMemoryError);
  EXPECT_THROW(pool.take(1, at::kByte), c10::OutOfMemoryError) << "not until there is room for all";
  EXPECT_EQ(ledger->peak(Role::communication), 600'000);
}

/// The second taker comes while the first one's promised buffers are being made.
TEST(BufferPool, LetsASecondTakerWaitForWhatIsPromised) {
  const auto ledger = std::make_shared<Ledger>();
  std::atomic<int> num_made = 0;
  std::promise<void> begun;
  BufferPool pool(ledger, Role::communication, at::kCPU, kDefaultMaxWaste, [&](int64_t bytes, Role role) {
    if (num_made++ == 0) {
      begun.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the other's time to go past it
    }
    return allocate_flat(ledger, role, bytes, at::kByte, at::kCPU);
  });
  pool.reserve({500'000, 1'000'000});
  std::thread other([&] {
    begun.get_future().wait();
    const Tensor second = pool.take(400'000, at::kByte);
    EXPECT_EQ(second.numel(), 400'000);
  });
  const Tensor first = pool.take(900'000, at::kByte);
  other.join();
  EXPECT_EQ(num_made, 2);
  EXPECT_EQ(ledger->peak(Role::late_communication), 0);
}

TEST(BufferPool, CountsWhatGoesBeyondItsReserveInARoleOfItsOwn) {
  const auto ledger = std::make_shared<Ledger>();
  BufferPool pool(ledger, Role::communication, at::kCPU);
  pool.reserve({1'000, 1'000});
  {
    const Tensor first = pool.take(1'000, at::kByte), second = pool.take(1'000, at::kByte);
    EXPECT_EQ(ledger->current(Role::late_communication), 0);
    EXPECT_EQ(ledger->text().find("late"), std::string::npos) << ledger->text();
    const Tensor third = pool.take(500, at::kByte);
    EXPECT_EQ(ledger->current(Role::late_communication), 500);
    EXPECT_NE(ledger->text().find("500 bytes of communication while ranks are late"), std::string::npos)
        << ledger->text();
  }
  EXPECT_EQ(ledger->peak(Role::communication), 2'000);
  EXPECT_EQ(ledger->current(Role::late_communication), 0);
  EXPECT_EQ(beyond_reserve(Role::gradients), Role::late_gradients);
  EXPECT_EQ(beyond_reserve(Role::gathered), Role::gathered);
}

TEST_F(Pool, TakesNothingForNothing) {
  pool_.put(Tensor());
  Tensor empty = pool_.take(0, at::kFloat);
  EXPECT_EQ(empty.numel(), 0);
  pool_.put(std::move(empty));
  EXPECT_EQ(pool_.take(0, at::kFloat).numel(), 0);
}

TEST(BufferPool, GivesIdleBuffersUpBeforeItRunsOutOfMemory) {
  const auto ledger = std::make_shared<Ledger>(1000);
  BufferPool pool(ledger, Role::communication, at::kCPU);
  pool.put(pool.take(100, at::kFloat));
  EXPECT_EQ(ledger->current(Role::communication), 400) << "kept";
  const Tensor other = pool.take(225, at::kFloat);
  EXPECT_EQ(ledger->current(Role::communication), 900);
  EXPECT_THROW(pool.take(100, at::kFloat), c10::OutOfMemoryError);
}

TEST(BufferPool, MayDieBeforeItsBuffers) {
  const auto ledger = std::make_shared<Ledger>();
  Tensor buffer;
  {
    BufferPool pool(ledger, Role::communication, at::kCPU);
    buffer = pool.take(16, at::kFloat);
  }
  buffer.copy_(at::ones({16}));
  EXPECT_EQ(ledger->current(Role::communication), 64);
  buffer.reset();
  EXPECT_EQ(ledger->current(Role::communication), 0);
}

}  // namespace
}  // namespace deeptide::device
