// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 to and from packed memory; included once per instruction set.
#if defined(DEEPTIDE_NUMERICS_PACKED_VECTORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_NUMERICS_PACKED_VECTORS_INL_H
#undef DEEPTIDE_NUMERICS_PACKED_VECTORS_INL_H
#else
#define DEEPTIDE_NUMERICS_PACKED_VECTORS_INL_H
#endif

#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"
#include "numerics/rounding/packed.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {

using DI = hn::RebindToSigned<D>;

/// Rare: kept out of the loops.
inline HWY_NOINLINE hn::Vec<DI> with_halfway(const PackedRange& from, size_t i, hn::Vec<DI> low, hn::Vec<DI> bits) {
  HWY_ALIGN int32_t lows[HWY_LANES(int32_t)];
  HWY_ALIGN int32_t lanes[HWY_LANES(int32_t)];
  hn::Store(low, DI(), lows);
  hn::Store(bits, DI(), lanes);
  detail::raise_halfway(from, i, hn::Lanes(DI()), lows, lanes);
  return hn::Load(DI(), lanes);
}

inline HWY_NOINLINE void note_halfway_lanes(const PackedRange& to, size_t i, hn::Vec<D32> bits) {
  HWY_ALIGN uint32_t lanes[HWY_LANES(uint32_t)];
  hn::Store(bits, D32(), lanes);
  detail::note_halfway(to, i, hn::Lanes(D32()), lanes);
}

template <typename InMemory>
HWY_INLINE V load_packed(InMemory part, const PackedRange& from, size_t i) {
  const auto bits_of = [&](const uint16_t* halves) {
    return hn::BitCast(DI(), part.get(reinterpret_cast<const c10::BFloat16*>(halves) + i));
  };
  const auto low = hn::ShiftRight<16>(bits_of(from.low));
  const auto bits = hn::Add(bits_of(from.high), low);
  if (HWY_LIKELY(hn::AllFalse(DI(), hn::Eq(low, hn::Set(DI(), -0x8000))))) return hn::BitCast(D(), bits);
  return hn::BitCast(D(), with_halfway(from, i, low, bits));
}

template <typename InMemory>
HWY_INLINE void store_packed(InMemory part, V x, const PackedRange& to, size_t i) {
  part.put(x, reinterpret_cast<c10::BFloat16*>(to.high) + i);
  const auto bits = hn::BitCast(D32(), hn::IfThenZeroElse(hn::IsNaN(x), part.keep(x)));
  part.put_bits(bits, to.low + i);
  const auto is_halfway = hn::Eq(hn::And(bits, hn::Set(D32(), 0xFFFFu)), hn::Set(D32(), 0x8000u));
  if (HWY_UNLIKELY(!hn::AllFalse(D32(), is_halfway))) note_halfway_lanes(to, i, bits);
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
