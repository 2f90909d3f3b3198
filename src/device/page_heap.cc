// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Manages ranges of mapped memory: finds them by size, merges them by address, returns them by age.
#include "device/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>

namespace deeptide::device {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLargePage = 2 << 20;
constexpr int64_t kMinGrowth = 8 << 20;
constexpr int64_t kMaxGrowth = 64 << 20;
constexpr uint64_t kWindow = 16384;  // counted in blocks: several steps of a large model

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

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

}  // namespace

PageHeap::~PageHeap() {
  for (const auto& [start, range] : ranges_) ::munmap(start, range.bytes);
}

void* PageHeap::allocate(int64_t bytes) noexcept try {
  bytes = round_up(std::max<int64_t>(bytes, 1), kPage);
  const std::lock_guard lock(mutex_);
  auto range = take_idle(bytes);
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
  range->second.key.value() = {range->second.bytes, range->first};
  idle_.insert(std::move(range->second.key));
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

/// Takes the smallest idle range that fits and marks it in use. Keeps an excess below a sixteenth in the block.
PageHeap::Ranges::iterator PageHeap::take_idle(int64_t bytes) {
  const auto found = idle_.lower_bound({bytes, nullptr});
  if (found == idle_.end()) return ranges_.end();
  const auto range = ranges_.find(found->second);
  const int64_t rest = range->second.bytes - bytes;
  if (rest > bytes / 16) {
    Range upper;
    upper.bytes = rest;
    upper.freed_at = range->second.freed_at;
    const auto split = ranges_.emplace_hint(std::next(range), range->first + bytes, std::move(upper));
    try {
      idle_.emplace(rest, split->first);
    } catch (const std::bad_alloc&) {
      ranges_.erase(split);
      throw;
    }
    range->second.bytes = bytes;
  }
  range->second.key = idle_.extract(found);
  range->second.idle = false;
  return range;
}

bool PageHeap::grow(int64_t bytes) {
  const int64_t mapped = stats_.in_use_bytes + stats_.idle_bytes;
  const int64_t wish = std::max(bytes, std::clamp(mapped / 8, kMinGrowth, kMaxGrowth));
  int64_t length = round_up(wish, kLargePage);
  char* start = map_large_pages(length);
  if (start == nullptr) {
    trim(0);
    length = round_up(bytes, kLargePage);
    start = map_large_pages(length);
  }
  if (start == nullptr) return false;
  try {
    add_idle(start, length);
  } catch (const std::bad_alloc&) {
    ::munmap(start, length);
    throw;
  }
  stats_.idle_bytes += length;
  return true;
}

void PageHeap::add_idle(char* start, int64_t bytes) {
  Range range;
  range.bytes = bytes;
  range.freed_at = clock_;
  const auto added = ranges_.emplace(start, std::move(range)).first;
  try {
    idle_.emplace(bytes, start);
  } catch (const std::bad_alloc&) {
    ranges_.erase(added);
    throw;
  }
  merge(added);
}

/// Joins an idle range with its idle neighbours.
PageHeap::Ranges::iterator PageHeap::merge(Ranges::iterator range) {
  const auto absorbs_next = [this](Ranges::iterator lower, Ranges::iterator upper) {
    if (!lower->second.idle || !upper->second.idle || lower->first + lower->second.bytes != upper->first) return false;
    idle_.erase({upper->second.bytes, upper->first});
    auto key = idle_.extract({lower->second.bytes, lower->first});
    lower->second.bytes += upper->second.bytes;
    lower->second.freed_at = std::max(lower->second.freed_at, upper->second.freed_at);
    ranges_.erase(upper);
    key.value().first = lower->second.bytes;
    idle_.insert(std::move(key));
    return true;
  };
  if (const auto next = std::next(range); next != ranges_.end()) absorbs_next(range, next);
  if (range == ranges_.begin()) return range;
  const auto before = std::prev(range);
  return absorbs_next(before, range) ? before : range;
}

/// Returns large pages to the kernel until at most `kept_bytes` are mapped, or no large page is without a block.
void PageHeap::trim(int64_t kept_bytes) noexcept try {
  for (;;) {
    const int64_t excess = stats_.in_use_bytes + stats_.idle_bytes - kept_bytes;
    if (excess <= 0 || !release_oldest(excess)) return;
  }
} catch (const std::bad_alloc&) {
  // Keeping the pages does no harm.
}

bool PageHeap::release_oldest(int64_t excess) {
  auto oldest = ranges_.end();
  for (const auto& [bytes, start] : idle_) {
    if (large_page_at_or_above(start) >= large_page_at_or_below(start + bytes)) continue;
    const auto range = ranges_.find(start);
    if (oldest == ranges_.end() || range->second.freed_at < oldest->second.freed_at) oldest = range;
  }
  return oldest != ranges_.end() && unmap(oldest, excess);
}

/// Unmaps `excess` bytes from the end of the range, in large pages inside it; the rest of the range stays mapped.
bool PageHeap::unmap(Ranges::iterator range, int64_t excess) {
  char* const start = range->first;
  char* const end = start + range->second.bytes;
  char* const to = large_page_at_or_below(end);
  char* const from = std::max(large_page_at_or_above(start), to - round_up(excess, kLargePage));
  const uint64_t freed_at = range->second.freed_at;
  if (to < end) {  // first, because it allocates memory
    Range upper;
    upper.bytes = end - to;
    upper.freed_at = freed_at;
    const auto split = ranges_.emplace(to, std::move(upper)).first;
    try {
      idle_.emplace(end - to, to);
    } catch (const std::bad_alloc&) {
      ranges_.erase(split);
      throw;
    }
    range->second.bytes = to - start;
    auto key = idle_.extract({end - start, start});
    key.value().first = to - start;
    idle_.insert(std::move(key));
  }
  if (::munmap(from, to - from) != 0) return false;  // too many mappings: kept
  stats_.idle_bytes -= to - from;
  auto key = idle_.extract({to - start, start});
  if (from == start) {
    ranges_.erase(range);
    return true;
  }
  range->second.bytes = from - start;
  key.value().first = from - start;
  idle_.insert(std::move(key));
  return true;
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
