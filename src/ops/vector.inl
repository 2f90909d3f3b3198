// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 from and to memory in fp32 or bf16; included once for each instruction set.
#include <hwy/highway.h>

#if defined(DEEPTIDE_OPS_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_OPS_VECTOR_INL_H
#undef DEEPTIDE_OPS_VECTOR_INL_H
#else
#define DEEPTIDE_OPS_VECTOR_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using D16 = hn::Rebind<uint16_t, D>;
using D32 = hn::RebindToUnsigned<D>;

HWY_INLINE V load(const float* from) { return hn::LoadU(D(), from); }

HWY_INLINE V load(const uint16_t* from) {
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(D32(), hn::LoadU(D16(), from))));
}

HWY_INLINE void store(V x, float* to) { hn::StoreU(x, D(), to); }

/// Rounds to nearest even, as torch does; a NaN becomes the quiet NaN, since rounding could carry its bits into Inf.
HWY_INLINE void store(V x, uint16_t* to) {
  const auto bits = hn::BitCast(D32(), x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(D32(), 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(D32(), 0x7FFFu))));
  const auto halves = hn::IfThenElse(hn::RebindMask(D32(), hn::IsNaN(x)), hn::Set(D32(), 0x7FC0u), rounded);
  hn::StoreU(hn::DemoteTo(D16(), hn::BitCast(hn::RebindToSigned<D>(), halves)), D16(), to);
}

/// Calls `body(i)` for each whole vector of `count` elements, and `tail(i, rest)` for what is left.
template <typename Body, typename Tail>
HWY_INLINE void for_vectors(size_t count, Body body, Tail tail) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i);
  if (i < count) tail(i, count - i);
}

/// The last `rest` elements, `fill` beyond them: the same vector code serves tails and bodies.
template <typename T>
HWY_INLINE V load_part(const T* from, size_t rest, float fill) {
  HWY_ALIGN T lanes[HWY_LANES(float)];
  store(hn::Set(D(), fill), lanes);
  for (size_t i = 0; i < rest; ++i) lanes[i] = from[i];
  return load(lanes);
}

template <typename T>
HWY_INLINE void store_part(V x, T* to, size_t rest) {
  HWY_ALIGN T lanes[HWY_LANES(float)];
  store(x, lanes);
  for (size_t i = 0; i < rest; ++i) to[i] = lanes[i];
}

}  // namespace deeptide::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
