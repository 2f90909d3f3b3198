// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Torch with the installed allocator: nothing changes but where large tensors lie.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "address_space.h"
#include "base/resources.h"
#include "base/sanitizers.h"
#include "deeptide/allocator.h"
#include "device/memory/shared_memory.h"

namespace deeptide {
namespace {

using at::Tensor;

constexpr int64_t kLarge = 256 << 10;  // bytes

#ifdef DEEPTIDE_SANITIZED
TEST(CpuAllocator, StaysOutOfASanitizersWay) { EXPECT_FALSE(install_cpu_allocator()); }
#else

class CpuAllocator : public testing::Test {
 protected:
  /// Made by torch's allocator, freed when the other one is installed.
  static inline Tensor large_from_before, small_from_before;

  static void SetUpTestSuite() {
    large_from_before = at::full({1 << 20}, 3.0);
    small_from_before = at::full({10}, 4.0);
    ASSERT_TRUE(install_cpu_allocator());
  }
};

int64_t in_use() { return cpu_allocator_stats().in_use_bytes; }

TEST_F(CpuAllocator, LeavesTensorsFromBeforeAsTheyAre) {
  EXPECT_EQ(in_use(), 0);
  EXPECT_EQ(large_from_before.sum().item<double>(), 3.0 * (1 << 20));
  large_from_before.resize_({1 << 21});  // takes new memory from the allocator that it came from
  EXPECT_EQ(large_from_before[5].item<double>(), 3.0);
  large_from_before.reset();
  small_from_before.reset();
  EXPECT_TRUE(install_cpu_allocator()) << "again is no mistake";
}

TEST_F(CpuAllocator, TakesLargeTensorsAndLeavesSmallOnes) {
  {
    const Tensor small = at::empty({kLarge - 1}, at::kByte), nothing = at::empty({0});
    EXPECT_EQ(in_use(), 0);
    const Tensor large = at::full({kLarge}, 7, at::kByte);
    EXPECT_GE(in_use(), kLarge);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(large.const_data_ptr()) % 64, 0u);
    EXPECT_EQ(large.sum().item<int64_t>(), 7 * kLarge);
  }
  EXPECT_EQ(in_use(), 0);
}

TEST_F(CpuAllocator, ServesResizedClonedAndRawMemory) {
  Tensor grown = at::full({100}, 2.0);
  grown.resize_({kLarge});
  EXPECT_EQ(grown[99].item<double>(), 2.0);
  EXPECT_EQ(grown.clone()[99].item<double>(), 2.0);
  grown.reset();
  auto* allocator = c10::GetCPUAllocator();
  for (const size_t bytes : {size_t{1}, size_t{1} << 20}) {
    void* raw = allocator->raw_allocate(bytes);
    *static_cast<char*>(raw) = 1;
    const auto copy = allocator->clone(raw, bytes);
    EXPECT_EQ(*static_cast<char*>(copy.get()), 1);
    EXPECT_TRUE(allocator->is_simple_data_ptr(copy));
    EXPECT_EQ(copy.get_deleter(), allocator->raw_deleter());
    allocator->raw_deallocate(raw);
  }
  EXPECT_EQ(in_use(), 0);
}

TEST_F(CpuAllocator, FreesOnAnotherThread) {
  Tensor tensor = at::full({kLarge}, 1.0);
  std::thread([moved = std::move(tensor)]() mutable { moved.reset(); }).join();
  EXPECT_EQ(in_use(), 0);
}

TEST_F(CpuAllocator, SaysTorchsErrorWhenThereIsNoMemory) {
  at::empty({64 << 20}, at::kByte);
  EXPECT_GT(cpu_allocator_stats().idle_bytes, 0);
  try {
    at::empty({int64_t{1} << 50}, at::kByte);
    FAIL() << "a petabyte";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("can't allocate memory"), std::string::npos) << error.what();
  }
  EXPECT_EQ(cpu_allocator_stats().idle_bytes, 0) << "what was idle was tried first";
}

/// A child of fork, while other threads allocate all the time, finds the heap usable.
TEST_F(CpuAllocator, SurvivesForks) {
  const Tensor before = at::full({kLarge}, 5.0);
  std::atomic<bool> stop = false;
  std::thread busy([&] {
    while (!stop) at::empty({kLarge});
  });
  for (int i = 0; i < 50; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // a lock that nobody will open ends it
      auto* allocator = c10::GetCPUAllocator();
      void* raw = allocator->raw_allocate(4 * kLarge);
      static_cast<char*>(raw)[4 * kLarge - 1] = 1;
      allocator->raw_deallocate(raw);
      ::_exit(before.const_data_ptr<float>()[kLarge - 1] == 5.0F ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  stop = true;
  busy.join();
}

/// Starts threads that stay until one needs what lies idle. Returns whether each has started.
bool start_beyond_idle_memory() {
  limit_addresses(1 << 20);
  while (cpu_allocator_stats().idle_bytes > 0) {
    std::thread thread = start_thread([] { ::pause(); });
    if (!thread.joinable()) return false;
    thread.detach();
  }
  return true;
}

/// Whether `run` returns true in a child whose heap keeps 64 MiB idle.
bool holds_beside_idle_memory(const std::function<bool()>& run) {
  const pid_t child = ::fork();
  if (child == 0) {
    at::empty({64 << 20}, at::kByte);
    ::_exit(run() ? 0 : 1);
  }
  int status = -1;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(CpuAllocator, GivesIdleMemoryBackForAThreadsStack) {
  EXPECT_TRUE(holds_beside_idle_memory(start_beyond_idle_memory));
}

TEST_F(CpuAllocator, GivesIdleMemoryBackForTheAddressesOfSharedMemory) {
  EXPECT_TRUE(holds_beside_idle_memory([] {
    limit_addresses(1 << 20);
    const auto memory = device::SharedMemory::create(32 << 20);
    return memory != nullptr && cpu_allocator_stats().idle_bytes == 0;
  }));
}

TEST_F(CpuAllocator, GivesIdleMemoryBackWhenAsked) {
  at::empty({64 << 20}, at::kByte);
  release_idle_cpu_memory();
  EXPECT_EQ(cpu_allocator_stats().idle_bytes, 0);
  EXPECT_GE(cpu_allocator_stats().peak_bytes, 64 << 20);
}
#endif

}  // namespace
}  // namespace deeptide
