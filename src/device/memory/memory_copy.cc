// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Streams whole cache lines with the widest stores available: a line written by halves may be flushed by halves.
// Compiled once per instruction set and chosen at run time.
#include "device/memory/memory_copy.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/memory/memory_copy.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// Must follow foreach_target.h, as Highway requires.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "device/parallel.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::device::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLine = 64;  // bytes

void copy(uint8_t* to, const uint8_t* from, size_t bytes) {
  const hn::CappedTag<uint8_t, kLine> d;
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  const size_t end = bytes - (bytes - head) % kLine;
  if (head > 0) std::memcpy(to, from, head);
  for (size_t i = head; i < end; i += hn::Lanes(d)) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  if (end < bytes) std::memcpy(to + end, from + end, bytes - end);
  hwy::FlushStream();
}

}  // namespace deeptide::device::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::device {

HWY_EXPORT(copy);

void copy_past_cache(void* to, const void* from, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy)(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes);
}

void copy_in_parallel(void* to, const void* from, size_t bytes) {
  constexpr int64_t kBlock = 64 << 10, kGrain = 16;  // a thread gets a mebibyte at least
  parallel_blocks(static_cast<int64_t>(bytes), kBlock, kGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

}  // namespace deeptide::device
#endif
