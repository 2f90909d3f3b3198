// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Manages ranges of mapped memory: finds them by size, merges them by address, returns them by age.
#include "device/memory/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>

#include "device/memory/pages.h"

namespace deeptide::device {
namespace {

constexpr int64_t kMinGrowth = 8 << 20;
constexpr int64_t kMaxGrowth = 64 << 20;
constexpr uint64_t kWindow = 16384;  // counted in blocks: several steps of a large model

char* large_page_at_or_above(char* address) {
  return reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(address), kLargePage));
}

char* large_page_at_or_below(char* address) {
  return reinterpret_cast<char*>(reinterpret_cast<int64_t>(address) / kLargePage * kLargePage);
}

char* map(int64_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

/// Maps whole large pages; null on failure. Tries without slack first: recent kernels align by themselves, and then
/// mappings are neighbours that can grow together.
char* map_large_pages(int64_t bytes) {
  char* base = map(bytes);
  if (base != nullptr && base != large_page_at_or_above(base)) {
    ::munmap(base, bytes);
    char* wide = map(bytes + kLargePage);
    if (wide == nullptr) return nullptr;
    base = large_page_at_or_above(wide);
    if (base > wide) ::munmap(wide, base - wide);
    if (char* end = wide + bytes + kLargePage; base + bytes < end) ::munmap(base + bytes, end - base - bytes);
  }
  if (base != nullptr) ::madvise(base, bytes, MADV_HUGEPAGE);  // a request: plain pages serve as well
  return base;
}

bool has_large_page(char* start, int64_t bytes) {
  return large_page_at_or_above(start) < large_page_at_or_below(start + bytes);
}

}  // namespace

PageHeap::~PageHeap() {
  for (const auto& [start, range] : ranges_) ::munmap(start, range.bytes);
}

void* PageHeap::allocate(int64_t bytes) noexcept try {
  if (bytes > kMostBytes) return nullptr;
  bytes = round_up(std::max<int64_t>(bytes, 1), kPage);
  std::unique_lock lock(mutex_);
  auto range = take_idle(bytes);
  if (range == ranges_.end() && before_growth_ != nullptr) {
    const int64_t growth = growth_for(bytes);
    lock.unlock();
    before_growth_(growth);
    lock.lock();
    range = take_idle(bytes);
  }
  if (range == ranges_.end() && grow(bytes)) range = take_idle(bytes);
  if (range == ranges_.end()) return nullptr;
  count(range->second.bytes);
  return range->first;
} catch (const std::bad_alloc&) {
  return nullptr;  // no memory for the heap's own records
}

bool PageHeap::owns(void* pointer) const noexcept {
  // All its blocks lie on page boundaries, so most foreign blocks cost no lock.
  if (reinterpret_cast<uintptr_t>(pointer) % kPage != 0) return false;
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(static_cast<char*>(pointer));
  return range != ranges_.end() && !range->second.idle;
}

void PageHeap::free(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(static_cast<char*>(block));
  stats_.in_use_bytes -= range->second.bytes;
  stats_.idle_bytes += range->second.bytes;
  range->second.idle = true;
  range->second.freed_at = clock_;
  enter(range);
  merge(range);
  trim(kept_bytes());
}

void PageHeap::release_idle() noexcept {
  const std::lock_guard lock(mutex_);
  trim(0);
}

CpuAllocatorStats PageHeap::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

PageHeap::AgeIndex& PageHeap::ages_of(Ranges::const_iterator range) {
  return has_large_page(range->first, range->second.bytes) ? large_ : fragments_;
}

/// Puts an idle range, with its extents as they are, into the indices.
void PageHeap::enter(Ranges::iterator range) {
  auto& [start, own] = *range;
  own.size_key.value() = {own.bytes, start};
  idle_.insert(std::move(own.size_key));
  if (own.hollow) return;
  own.age_key.value() = {own.freed_at, start};
  ages_of(range).insert(std::move(own.age_key));
}

/// Takes it out of them, before its extents change.
void PageHeap::leave(Ranges::iterator range) {
  auto& [start, own] = *range;
  own.size_key = idle_.extract({own.bytes, start});
  if (!own.hollow) own.age_key = ages_of(range).extract({own.freed_at, start});
}

/// Adds an idle range at addresses that no range covers, and counts its pages unless it is hollow.
PageHeap::Ranges::iterator PageHeap::add_idle(char* start, int64_t bytes, uint64_t freed_at, bool hollow) {
  SizeIndex sizes;
  AgeIndex ages;
  sizes.emplace(bytes, start);
  ages.emplace(freed_at, start);
  const auto added = ranges_.emplace(start, Range{}).first;  // the last that may fail
  added->second.bytes = bytes;
  added->second.freed_at = freed_at;
  added->second.hollow = hollow;
  added->second.size_key = sizes.extract(sizes.begin());
  added->second.age_key = ages.extract(ages.begin());
  enter(added);
  return added;
}

/// Takes the smallest idle range that fits and marks it in use. Keeps an excess below a sixteenth in the block.
PageHeap::Ranges::iterator PageHeap::take_idle(int64_t bytes) {
  const auto found = idle_.lower_bound({bytes, nullptr});
  if (found == idle_.end()) return ranges_.end();
  const auto range = ranges_.find(found->second);
  const int64_t rest = range->second.bytes - bytes;
  leave(range);
  if (rest > bytes / 16) {
    range->second.bytes = bytes;
    try {
      add_idle(range->first + bytes, rest, range->second.freed_at, range->second.hollow);
    } catch (const std::bad_alloc&) {
      range->second.bytes += rest;
      enter(range);
      throw;
    }
  }
  if (range->second.hollow) fill(range->second, range->first);
  range->second.hollow = false;
  range->second.idle = false;
  return range;
}

/// Returns the bytes that the heap would like to map for a block.
int64_t PageHeap::growth_for(int64_t bytes) const {
  const int64_t mapped = stats_.in_use_bytes + stats_.idle_bytes;
  return round_up(std::max(bytes, std::clamp(mapped / 8, kMinGrowth, kMaxGrowth)), kLargePage);
}

bool PageHeap::grow(int64_t bytes) {
  int64_t length = growth_for(bytes);
  char* start = map_large_pages(length);
  if (start == nullptr) {
    trim(0);
    length = round_up(bytes, kLargePage);
    start = map_large_pages(length);
  }
  if (start == nullptr) return false;
  try {
    stats_.idle_bytes += length;
    merge(add_idle(start, length, clock_, /*hollow=*/false));
  } catch (const std::bad_alloc&) {
    ::munmap(start, length);
    stats_.idle_bytes -= length;
    throw;
  }
  return true;
}

/// Counts a hollow range as having its pages, which come back as they are touched.
void PageHeap::fill(Range& range, char* start) {
  stats_.idle_bytes += range.bytes;
  range.hollow = false;
  ::madvise(start, range.bytes, MADV_HUGEPAGE);
}

/// Joins an idle range with its idle neighbours. The whole counts as having its pages if a part has.
PageHeap::Ranges::iterator PageHeap::merge(Ranges::iterator range) {
  const auto absorbs_next = [this](Ranges::iterator lower, Ranges::iterator upper) {
    if (!lower->second.idle || !upper->second.idle || lower->first + lower->second.bytes != upper->first) return false;
    leave(upper);
    leave(lower);
    Range& own = lower->second;
    if (own.hollow != upper->second.hollow) {
      own.hollow ? fill(own, lower->first) : fill(upper->second, upper->first);
    }
    own.bytes += upper->second.bytes;
    own.freed_at = std::max(own.freed_at, upper->second.freed_at);
    ranges_.erase(upper);
    enter(lower);
    return true;
  };
  if (const auto next = std::next(range); next != ranges_.end()) absorbs_next(range, next);
  if (range == ranges_.begin()) return range;
  const auto before = std::prev(range);
  return absorbs_next(before, range) ? before : range;
}

/// Returns idle memory to the kernel until at most `kept_bytes` are kept.
void PageHeap::trim(int64_t kept_bytes) noexcept try {
  for (;;) {
    const int64_t excess = stats_.in_use_bytes + stats_.idle_bytes - kept_bytes;
    if (excess <= 0 || !release_oldest(excess)) return;
  }
} catch (const std::bad_alloc&) {
  // Keeping the pages does no harm.
}

bool PageHeap::release_oldest(int64_t excess) {
  if (!large_.empty()) return unmap(ranges_.find(large_.begin()->second), excess);
  return !fragments_.empty() && hollow_out(ranges_.find(fragments_.begin()->second));
}

/// Gives the pages of a fragment back, and keeps its addresses for later blocks. No large pages there: the kernel's
/// khugepaged would fill the holes again, a few per minute.
bool PageHeap::hollow_out(Ranges::iterator range) {
  if (::madvise(range->first, range->second.bytes, MADV_DONTNEED) != 0) return false;
  ::madvise(range->first, range->second.bytes, MADV_NOHUGEPAGE);
  leave(range);
  range->second.hollow = true;
  enter(range);
  stats_.idle_bytes -= range->second.bytes;
  return true;
}

/// Unmaps `excess` bytes from the end of the range, in large pages inside it; the rest of the range stays mapped.
bool PageHeap::unmap(Ranges::iterator range, int64_t excess) {
  char* const start = range->first;
  char* const end = start + range->second.bytes;
  char* const to = large_page_at_or_below(end);
  char* const from = std::max(large_page_at_or_above(start), to - round_up(excess, kLargePage));
  leave(range);
  if (to < end) {  // first, because it allocates memory
    range->second.bytes = to - start;
    try {
      add_idle(to, end - to, range->second.freed_at, /*hollow=*/false);
    } catch (const std::bad_alloc&) {
      range->second.bytes = end - start;
      enter(range);
      throw;
    }
  }
  const bool unmapped = ::munmap(from, to - from) == 0;  // else too many mappings: kept
  if (unmapped) {
    stats_.idle_bytes -= to - from;
    range->second.bytes = from - start;
  }
  if (range->second.bytes == 0) {
    ranges_.erase(range);
  } else {
    enter(range);
  }
  return unmapped;
}

int64_t PageHeap::kept_bytes() const {
  return std::max(min_kept_bytes_, std::max(window_peak_, earlier_peak_) / 4 * 5);
}

/// Counts a new block, with `taken` bytes from idle ranges.
void PageHeap::count(int64_t taken) {
  stats_.in_use_bytes += taken;
  stats_.idle_bytes -= taken;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  if (++clock_ % kWindow == 0) {
    earlier_peak_ = window_peak_;
    window_peak_ = 0;
  }
  window_peak_ = std::max(window_peak_, stats_.in_use_bytes);
}

}  // namespace deeptide::device
