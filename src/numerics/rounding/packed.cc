// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packs ranges, compiled once per instruction set, and keeps what 16 bits cannot say.
#include "numerics/rounding/packed.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/rounding/packed.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "numerics/rounding/packed_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {

void unpack_range(const PackedRange& from, size_t count, float* to) {
  each_vector(0, count, [&](auto part, size_t i) { part.put(load_packed(part, from, i), to + i); });
}
void pack_range(const float* from, size_t count, const PackedRange& to) {
  each_vector(0, count, [&](auto part, size_t i) { store_packed(part, part.get(from + i), to, i); });
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(unpack_range);
HWY_EXPORT(pack_range);

HalfwayBits::HalfwayBits(int64_t numel) : chunks_(static_cast<size_t>((numel + kChunk - 1) / kChunk)) {}

bool HalfwayBits::is_above(int64_t element) const {
  const std::lock_guard lock(mutex_);
  const auto& chunk = chunks_.at(static_cast<size_t>(element / kChunk));
  const auto at = static_cast<size_t>(element % kChunk);
  return chunk && ((*chunk)[at / 64] >> (at % 64) & 1) != 0;
}

void HalfwayBits::set(int64_t element, bool above) {
  const std::lock_guard lock(mutex_);
  auto& chunk = chunks_.at(static_cast<size_t>(element / kChunk));
  if (!chunk && !above) return;
  if (!chunk) chunk = std::make_unique<Chunk>(Chunk{});
  const auto at = static_cast<size_t>(element % kChunk);
  const uint64_t bit = uint64_t{1} << (at % 64);
  uint64_t& word = (*chunk)[at / 64];
  word = above ? word | bit : word & ~bit;
}

void unpack(const PackedRange& from, int64_t count, float* to) {
  HWY_DYNAMIC_DISPATCH(unpack_range)(from, static_cast<size_t>(count), to);
}

void pack(const float* from, int64_t count, const PackedRange& to) {
  HWY_DYNAMIC_DISPATCH(pack_range)(from, static_cast<size_t>(count), to);
}

namespace detail {

void raise_halfway(const PackedRange& range, size_t first, size_t count, const int32_t* low, int32_t* bits) {
  for (size_t i = 0; i < count; ++i) {
    const int64_t element = range.first + static_cast<int64_t>(first + i);
    if (low[i] != -0x8000 || !range.halfway->is_above(element)) continue;
    bits[i] = static_cast<int32_t>(static_cast<uint32_t>(bits[i]) + 0x10000u);  // wraps where a NaN was noted
  }
}

/// Halves round to even: an even upper half means that the number lies above what it rounds to.
void note_halfway(const PackedRange& range, size_t first, size_t count, const uint32_t* bits) {
  for (size_t i = 0; i < count; ++i) {
    if ((bits[i] & 0xFFFFu) != 0x8000u) continue;
    range.halfway->set(range.first + static_cast<int64_t>(first + i), (bits[i] >> 16 & 1) == 0);
  }
}

}  // namespace detail
}  // namespace deeptide::numerics
#endif  // HWY_ONCE
