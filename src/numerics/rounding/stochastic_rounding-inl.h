// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Random bits by index, and rounding by them, as vector code; included once per instruction set.
#if defined(DEEPTIDE_NUMERICS_STOCHASTIC_ROUNDING_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_NUMERICS_STOCHASTIC_ROUNDING_INL_H
#undef DEEPTIDE_NUMERICS_STOCHASTIC_ROUNDING_INL_H
#else
#define DEEPTIDE_NUMERICS_STOCHASTIC_ROUNDING_INL_H
#endif

#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"
#include "numerics/rounding/stochastic_rounding.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {

using U = hn::Vec<D32>;

/// 32 bits for each element from `index` on: 16 for each of the streams 2 * pair and 2 * pair + 1. What a lane gets
/// does not depend on the lanes beside it.
HWY_INLINE U random_bits(const RandomKey& key, int pair, int64_t index) {
  constexpr uint32_t kFirst = 0x9E3779B9u, kSecond = 0x85EBCA6Bu;  // of the index's upper half
  const D32 d;
  const auto low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(static_cast<uint64_t>(index) >> 32);
  const U place = hn::Add(hn::Set(d, low), hn::Iota(d, 0u));
  U first = hn::Set(d, key.first[pair] + high * kFirst), second = hn::Set(d, key.second[pair] + high * kSecond);
  if (HWY_UNLIKELY(low + static_cast<uint32_t>(hn::Lanes(d)) < low)) {
    const auto wraps = hn::Lt(place, hn::Set(d, low));
    first = hn::Add(first, hn::IfThenElseZero(wraps, hn::Set(d, kFirst)));
    second = hn::Add(second, hn::IfThenElseZero(wraps, hn::Set(d, kSecond)));
  }
  U x = hn::Add(place, first);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(d, 0x7FEB352Du));
  x = hn::Xor(x, second);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(d, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

HWY_INLINE U bits_of_stream(U random, int stream) {
  return stream % 2 == 0 ? hn::And(random, hn::Set(D32(), 0xFFFFu)) : hn::ShiftRight<16>(random);
}

/// Rounds where a finite number could become infinite, or is not finite. Rare: kept out of the loops.
inline HWY_NOINLINE U rounded_with_care(U bits, U random) {
  const D32 d;
  const U sign = hn::And(bits, hn::Set(d, 0x80000000u)), magnitude = hn::Xor(bits, sign);
  const U most = hn::Set(d, 0x7F7F0000u);  // the largest finite bf16 number
  const U finite = hn::Min(hn::Add(magnitude, random), hn::Or(most, hn::Set(d, 0xFFFFu)));
  const U other = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7F800000u)), hn::Set(d, 0x7FC00000u), magnitude);
  const U chosen = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x7F800000u)), finite, other);
  return hn::ShiftRight<16>(hn::Or(chosen, sign));
}

/// The bf16 number's bits in each lane. `random`: 16 bits per lane. Adding them to the magnitude carries into the upper
/// half as often as the lower half says.
HWY_INLINE U rounded_by(V x, U random) {
  const D32 d;
  const U bits = hn::BitCast(d, x);
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::And(hn::BitCast(di, bits), hn::Set(di, 0x7FFFFFFF));
  if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Gt(magnitude, hn::Set(di, 0x7F7EFFFF)))))
    return rounded_with_care(bits, random);
  return hn::ShiftRight<16>(hn::Add(bits, random));
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
