// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buffers of the host beside a device's copies: what arrives, and what waits for what.
#include "tiers/copied_store.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <filesystem>
#include <numeric>

#include "device/memory/page_locked.h"
#include "io/queue.h"
#include "simulated/streams.h"
#include "tiers/file_store.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;
using device::Lane;
using device::Ledger;
using device::PageLocked;
using device::Role;
using tiers::Access;
using tiers::Buffer;
using tiers::ReadsUnderWay;

constexpr int64_t kNumel = 3000;

Machine& machine() { return Machine::instance(); }

Tensor page_locked(int64_t numel) {
  return at::empty({numel}, at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
}

/// An access of the host to what is still copied ends the process.
class CopiedBuffer : public EverySchedule {
 protected:
  void SetUp() override {
    Settings settings;
    settings.guard_pinned = true;
    configure(settings);
  }

  /// Copies the buffer to new memory of the device, on a lane of its own.
  Tensor fetch(const Buffer& buffer) {
    const Lane::Scope scope(gathers_);
    Tensor whole = empty_simulated({buffer.numel()});
    buffer.copy_to(whole);
    return whole;
  }
  Tensor on_host(const Tensor& whole) {
    Lane::current(simulated_device()).wait_for(gathers_.mark());
    return whole.cpu();
  }

  Lane gathers_ = Lane::create(simulated_device());
};

TEST_P(CopiedBuffer, IsReadByCopiesThatLaterWritesOfTheHostDoNotOvertake) {
  const Buffer buffer = tiers::copied_buffer(Buffer::resident(page_locked(kNumel)), std::make_shared<ReadsUnderWay>());
  EXPECT_FALSE(buffer.in_place().defined());
  std::vector<std::pair<int, Tensor>> wholes;
  for (int step = 0; step < 6; ++step) {
    {
      const auto lease = buffer.lease({0, kNumel}, Access::write);
      lease.tensor().fill_(step);
    }
    for (int read = 0; read <= step % 2; ++read) wholes.emplace_back(step, fetch(buffer));
  }
  for (const auto& [step, whole] : wholes) EXPECT_TRUE(at::equal(on_host(whole), at::zeros({kNumel}) + step)) << step;
}

TEST_P(CopiedBuffer, IsWrittenByADeviceBetweenCopiesThatReadIt) {
  const Buffer buffer = tiers::copied_buffer(Buffer::resident(page_locked(kNumel)), std::make_shared<ReadsUnderWay>());
  buffer.copy_from(at::arange(kNumel, at::kFloat));
  const Tensor before = fetch(buffer);
  machine().host_waits();
  buffer.copy_from(empty_simulated({100}).fill_(7), 50);
  const Tensor after = fetch(buffer);
  EXPECT_TRUE(machine().host_waits().empty()) << "copies are ordered on the device";
  EXPECT_TRUE(at::equal(on_host(before), at::arange(kNumel, at::kFloat)));
  Tensor expected = at::arange(kNumel, at::kFloat);
  expected.narrow(0, 50, 100).fill_(7);
  EXPECT_TRUE(at::equal(on_host(after), expected));
  EXPECT_TRUE(at::equal(buffer.copy(), expected)) << "the host waits for what a device writes";
}

TEST_P(CopiedBuffer, PassesThroughFewBlocksFromFiles) {
  const auto ledger = std::make_shared<Ledger>();
  const int64_t block = tiers::swap_block_numel(at::kFloat), numel = 4 * block + 5;
  for (const int slots : {2, 3}) {
    const auto file = std::make_shared<tiers::SwapFile>(std::vector{std::filesystem::temp_directory_path().string()});
    const auto staging = std::make_shared<tiers::Staging>(io::make_queue(slots), slots, ledger, Role::host_parameters,
                                                          simulated_device());
    EXPECT_EQ(ledger->current(Role::host_parameters), slots * tiers::kSwapBlockBytes);
    const auto reads = std::make_shared<ReadsUnderWay>(slots - 1);
    std::vector<Buffer> buffers;
    for (int i = 0; i < 2; ++i) {
      buffers.push_back(
          tiers::copied_buffer(tiers::file_buffer(page_locked(0), numel, file, staging, "what a test keeps"), reads));
      buffers.back().copy_from(at::arange(numel, at::kFloat) + i);
    }
    buffers[0].copy_from(empty_simulated({3}).fill_(9), block - 1);  // in two blocks
    Tensor expected = at::arange(numel, at::kFloat);
    expected.narrow(0, block - 1, 3).fill_(9);
    for (int round = 0; round < 2; ++round) {
      const Tensor first = fetch(buffers[0]), second = fetch(buffers[1]);
      EXPECT_TRUE(at::equal(on_host(first), expected));
      EXPECT_TRUE(at::equal(on_host(second), at::arange(numel, at::kFloat) + 1));
    }
  }
  EXPECT_EQ(ledger->current(Role::host_parameters), 0);
}

/// A store that forgot its copies would let a step do this.
TEST_P(CopiedBuffer, FindsAMissingWait) {
  const Tensor memory = page_locked(kNumel);
  const Buffer buffer = tiers::copied_buffer(Buffer::resident(memory), std::make_shared<ReadsUnderWay>());
  buffer.copy_from(at::zeros({kNumel}));
  fetch(buffer);
  EXPECT_ANY_THROW(machine().host_access(memory.const_data_ptr(), memory.nbytes(), true, "a rule's step"));
  EXPECT_TRUE(has_match(machine().settle(), "the host .a rule's step. writes .*the host has not waited for it"));
  const auto lease = buffer.lease({0, kNumel}, Access::write);
  EXPECT_NO_THROW(machine().host_access(memory.const_data_ptr(), memory.nbytes(), true, "a rule's step"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, CopiedBuffer, every_schedule(), schedule_name);

TEST(PageLockedMemory, GivesBuffersOutOfPowersOfTwo) {
  constexpr int64_t kMiB = 1 << 20;
  const std::vector<std::vector<int64_t>> cases = {{},
                                                   {0, 1, 0},
                                                   {64, 4096, 4097},
                                                   std::vector<int64_t>(10, 4 * kMiB),
                                                   std::vector<int64_t>(100, 5 * kMiB + 64),
                                                   {kMiB, 30 * kMiB, 7, 3 * kMiB, 30 * kMiB}};
  for (const auto& sizes : cases) {
    const auto ledger = std::make_shared<Ledger>();
    const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    {
      PageLocked memory(ledger, Role::host_parameters, simulated_device(), sizes);
      EXPECT_EQ(memory.nbytes(), PageLocked::forecast(sizes));
      EXPECT_EQ(memory.nbytes(), ledger->current(Role::host_parameters));
      EXPECT_GE(memory.nbytes(), total);
      std::vector<Tensor> buffers;
      for (size_t i = 0; i < sizes.size(); ++i) {
        buffers.push_back(memory.take(sizes[i], at::kByte).fill_(static_cast<int64_t>(i)));
      }
      for (size_t i = 0; i < sizes.size(); ++i) {
        EXPECT_EQ(buffers[i].numel(), sizes[i]);
        EXPECT_TRUE(at::equal(buffers[i], at::zeros({sizes[i]}, at::kByte) + static_cast<int64_t>(i)));
      }
      EXPECT_ANY_THROW(memory.take(1, at::kByte));
    }
    EXPECT_EQ(ledger->current(Role::host_parameters), 0);
  }
  EXPECT_EQ(PageLocked::forecast(cases[3]), 40 * kMiB) << "blocks of a power of two leave nothing over";
  EXPECT_LE(PageLocked::forecast(cases[4]), 9 * (100 * (5 * kMiB + 64)) / 8);
}

}  // namespace
}  // namespace deeptide::simulated
