// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Wraps the heap of large pages as a c10 allocator, and installs it.
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <exception>

#include "base/invariant.h"
#include "base/resources.h"
#include "base/sanitizers.h"
#include "deeptide/allocator.h"
#include "device/memory/idle_memory.h"
#include "device/memory/page_heap.h"

namespace deeptide::device {

using c10::DataPtr;

namespace {

constexpr size_t kLargeBlockBytes = 256 << 10;  // malloc packs smaller blocks into pages better
constexpr int64_t kMinKeptBytes = 64 << 20;

/// Never destroyed: tensors are freed until the process ends.
PageHeap& heap() {
  static PageHeap& heap = *new PageHeap(kMinKeptBytes, &make_room);
  return heap;
}

/// Frees blocks of either kind, since c10 wants one deleter per allocator.
void release(void* block) {
  if (!heap().owns(block)) return c10::GetDefaultCPUAllocator()->raw_deleter()(block);
  c10::profiledCPUMemoryReporter().Delete(block);
  heap().free(block);
}

class LargePageAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(size_t bytes) override {
    void* block = bytes >= kLargeBlockBytes ? heap().allocate(static_cast<int64_t>(bytes)) : nullptr;
    if (block == nullptr) return allocate_default(bytes);
    DataPtr data(block, block, &release, c10::DeviceType::CPU);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  /// Fails with the error that torch's users know.
  static DataPtr allocate_default(size_t bytes) {
    c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
    DataPtr data;
    std::exception_ptr refused;
    const bool taken = take_before_idle([&] {
      try {
        data = allocator->allocate(bytes);
        return true;
      } catch (const c10::Error&) {
        refused = std::current_exception();
        return false;
      }
    });
    if (!taken) std::rethrow_exception(refused);
    DEEPTIDE_INVARIANT(data.compare_exchange_deleter(allocator->raw_deleter(), &release),
                       "memory with another deleter than its allocator's");
    return data;
  }
};

bool install() {
#ifdef DEEPTIDE_SANITIZED
  return false;
#else
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;
  watch_forks();
  give_memory_back = &release_idle_heap;
  c10::SetCPUAllocator(new LargePageAllocator());  // with the default's priority: the program may still set its own
  return true;
#endif
}

}  // namespace
}  // namespace deeptide::device

namespace deeptide {

void device::watch_forks() {
  static const int watched =
      ::pthread_atfork([] { heap().mutex().lock(); }, [] { heap().mutex().unlock(); }, [] { heap().mutex().unlock(); });
  static_cast<void>(watched);
}

bool install_cpu_allocator() {
  static const bool installed = device::install();
  return installed;
}

CpuAllocatorStats cpu_allocator_stats() { return device::heap().stats(); }

bool device::release_idle_heap() {
  if (heap().stats().idle_bytes == 0) return false;
  heap().release_idle();
  return true;
}

void release_idle_cpu_memory() { device::heap().release_idle(); }

}  // namespace deeptide
