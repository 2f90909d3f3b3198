// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Flat memory: zeroed, aligned, counted while it lives, and no more of it than was asked for.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "device/memory/memory.h"

namespace deeptide::device {
namespace {

constexpr int64_t kKilo = 1000;

std::shared_ptr<Ledger> new_ledger() { return std::make_shared<Ledger>(); }

/// This process's resident bytes.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

TEST(FlatPages, IsZeroedAlignedAndCountedWhileItLives) {
  const auto ledger = new_ledger();
  for (const int64_t numel : {0, 1, 1000, 1 << 19, (1 << 19) + 1, 3'000'001}) {
    at::Tensor flat = allocate_flat(ledger, Role::gradients, numel, at::kFloat, at::kCPU);
    EXPECT_EQ(flat.numel(), numel);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(flat.data_ptr()) % kAlignmentBytes, 0);
    const float* data = flat.const_data_ptr<float>();
    for (int64_t i = 0; i < numel; ++i) ASSERT_EQ(data[i], 0.0F);
    if (numel > 0) flat.mutable_data_ptr<float>()[numel - 1] = 1.0F;
    EXPECT_EQ(ledger->current(Role::gradients), 4 * numel);
    flat.reset();
    EXPECT_EQ(ledger->current(Role::gradients), 0);
  }
  EXPECT_EQ(ledger->peak(Role::gradients), 4 * 3'000'001);
  EXPECT_EQ(ledger->peak(Role::parameters), 0);
}

TEST(FlatPages, TakesNoLargePageForATail) {
  const auto ledger = new_ledger();
  constexpr int64_t kBytes = (2 << 20) + 4096;  // two large pages would be nearly twice as much
  std::vector<at::Tensor> buffers;
  const int64_t before = resident_bytes();
  for (int i = 0; i < 32; ++i) {
    buffers.push_back(allocate_flat(ledger, Role::optimizer, kBytes, at::kByte, at::kCPU));
    char* data = static_cast<char*>(buffers.back().mutable_data_ptr());
    for (int64_t at = 0; at < kBytes; at += 4096) data[at] = 1;
  }
  EXPECT_LT(resident_bytes() - before, 32 * kBytes * 5 / 4);
}

TEST(FlatPages, AllocatedUnderInferenceModeServesTraining) {
  at::Tensor flat;
  {
    const c10::InferenceMode inference;
    flat = allocate_flat(new_ledger(), Role::gathered, 8, at::kFloat, at::kCPU);
  }
  EXPECT_FALSE(flat.is_inference());
}

TEST(PoolWaste, GivesAKeptBufferAgainUpToItsWaste) {
  const auto ledger = new_ledger();
  BufferPool pool(ledger, Role::communication, at::kCPU);
  at::Tensor large = pool.take(1000 * kKilo, at::kFloat);
  const void* memory = large.data_ptr();
  pool.put(std::move(large));
  at::Tensor half = pool.take(500 * kKilo, at::kFloat);
  EXPECT_EQ(half.data_ptr(), memory);
  EXPECT_EQ(half.numel(), 500 * kKilo);
  pool.put(std::move(half));
  at::Tensor small = pool.take(499 * kKilo, at::kFloat);  // the kept one is more than twice that: it goes
  EXPECT_EQ(ledger->current(Role::communication), 4 * 499 * kKilo);
}

TEST(PoolWaste, WithoutWasteNeverHoldsMoreThanWasTakenAtOnce) {
  const auto ledger = new_ledger();
  BufferPool pool(ledger, Role::gathered, at::kCPU, /*max_waste=*/1);
  at::Tensor first = pool.take(1000 * kKilo, at::kFloat);
  pool.put(std::move(first));
  at::Tensor second = pool.take(600 * kKilo, at::kFloat);
  at::Tensor third = pool.take(400 * kKilo, at::kFloat);
  EXPECT_EQ(ledger->peak(Role::gathered), 4000 * kKilo);
  const void* memory = third.data_ptr();
  pool.put(std::move(third));
  EXPECT_EQ(pool.take(400 * kKilo, at::kFloat).data_ptr(), memory);
  EXPECT_EQ(ledger->peak(Role::gathered), 4000 * kKilo);
}

}  // namespace
}  // namespace deeptide::device
