// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A heap of large blocks in large pages, which keeps what was freed for the next taker.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "deeptide/allocator.h"

namespace deeptide::device {

/// Best fit in mapped ranges; freed neighbours grow together again. What is mapped stays within the larger of
/// `min_kept_bytes` and 1.25 x the most that was in use lately; beyond it, what was freed longest ago goes back to the
/// kernel in large pages. Thread-safe. A block may be freed by any thread.
class PageHeap {
 public:
  explicit PageHeap(int64_t min_kept_bytes = int64_t{64} << 20) : min_kept_bytes_(min_kept_bytes) {}
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// A block aligned to 4096 bytes, its contents undefined; null when there is no memory even without what was kept.
  void* allocate(int64_t bytes) noexcept;
  /// Of a block that `allocate` returned.
  void free(void* block) noexcept;
  /// Whether `pointer` is a block in use of this heap.
  bool owns(void* pointer) const noexcept;
  /// Returns to the kernel all large pages without a block in them.
  void release_idle() noexcept;
  CpuAllocatorStats stats() const;

  /// Held over a fork, so that the child finds the heap whole.
  std::mutex& mutex() { return mutex_; }

 private:
  using IdleIndex = std::set<std::pair<int64_t, char*>>;  // by bytes, then by address
  struct Range {
    int64_t bytes = 0;
    bool idle = true;
    uint64_t freed_at = 0;
    IdleIndex::node_type key;  // while in use: its place in the index, so that freeing needs no memory
  };
  using Ranges = std::map<char*, Range>;

  Ranges::iterator take_idle(int64_t bytes);
  bool grow(int64_t bytes);
  void add_idle(char* start, int64_t bytes);
  Ranges::iterator merge(Ranges::iterator range);
  bool release_oldest(int64_t excess);
  bool unmap(Ranges::iterator range, int64_t excess);
  void trim(int64_t kept_bytes) noexcept;
  int64_t kept_bytes() const;
  void count(int64_t taken);

  mutable std::mutex mutex_;
  const int64_t min_kept_bytes_;
  Ranges ranges_;
  IdleIndex idle_;
  CpuAllocatorStats stats_;
  uint64_t clock_ = 0;        // blocks taken so far
  int64_t window_peak_ = 0;   // most in use in this window of the clock
  int64_t earlier_peak_ = 0;  // and in the one before
};

}  // namespace deeptide::device
