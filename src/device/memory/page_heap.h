// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A heap of large blocks in large pages, which keeps freed memory for reuse.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "deeptide/allocator.h"

namespace deeptide::device {

/// Best fit in mapped ranges; freed neighbours merge. What it keeps in memory stays within the larger of
/// `min_kept_bytes` and 1.25 x the recent peak in use. Beyond that, the memory freed longest ago returns to the kernel:
/// whole large pages first, then the plain pages of fragments between blocks. Thread-safe. Any thread may free a block.
/// A forked child has a copy that it may use as its own.
class PageHeap {
 public:
  /// `before_growth` runs without the heap's lock before the heap maps so many bytes or more.
  using BeforeGrowth = void (*)(int64_t bytes) noexcept;
  explicit PageHeap(int64_t min_kept_bytes = int64_t{64} << 20, BeforeGrowth before_growth = nullptr)
      : min_kept_bytes_(min_kept_bytes), before_growth_(before_growth) {}
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// Returns a block aligned to 4096 bytes, contents undefined; null if there is no memory even without idle ranges.
  void* allocate(int64_t bytes) noexcept;
  /// Frees a block that `allocate` returned.
  void free(void* block) noexcept;
  /// Whether `pointer` is a block of this heap in use.
  bool owns(void* pointer) const noexcept;
  /// Returns all idle memory to the kernel.
  void release_idle() noexcept;
  CpuAllocatorStats stats() const;

  /// Hold it over a fork, so that the child finds the heap consistent.
  std::mutex& mutex() { return mutex_; }

 private:
  using SizeIndex = std::set<std::pair<int64_t, char*>>;  // by bytes, then by address
  using AgeIndex = std::set<std::pair<uint64_t, char*>>;  // by the time of freeing, then by address
  struct Range {
    int64_t bytes = 0;
    bool idle = true;
    bool hollow = false;  // idle, and its pages were given back
    uint64_t freed_at = 0;
    // Its nodes of the indices, while it is not in them: freeing needs no memory.
    SizeIndex::node_type size_key;
    AgeIndex::node_type age_key;
  };
  using Ranges = std::map<char*, Range>;

  Ranges::iterator take_idle(int64_t bytes);
  int64_t growth_for(int64_t bytes) const;
  bool grow(int64_t bytes);
  Ranges::iterator add_idle(char* start, int64_t bytes, uint64_t freed_at, bool hollow);
  void enter(Ranges::iterator range);
  void leave(Ranges::iterator range);
  AgeIndex& ages_of(Ranges::const_iterator range);
  Ranges::iterator merge(Ranges::iterator range);
  bool release_oldest(int64_t excess);
  bool unmap(Ranges::iterator range, int64_t excess);
  bool hollow_out(Ranges::iterator range);
  void fill(Range& range, char* start);
  void trim(int64_t kept_bytes) noexcept;
  int64_t kept_bytes() const;
  void count(int64_t taken);

  mutable std::mutex mutex_;
  const int64_t min_kept_bytes_;
  const BeforeGrowth before_growth_;
  Ranges ranges_;
  SizeIndex idle_;
  AgeIndex large_;      // idle ranges with a whole large page in them
  AgeIndex fragments_;  // idle ranges without one that have their pages
  CpuAllocatorStats stats_;
  uint64_t clock_ = 0;        // blocks taken so far
  int64_t window_peak_ = 0;   // most in use in this window of the clock
  int64_t earlier_peak_ = 0;  // most in use in the previous window
};

}  // namespace deeptide::device
