// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 to and from memory in fp32, bf16 or fp16, whole or in part; included once per instruction set.
#if defined(DEEPTIDE_NUMERICS_FLOAT_VECTORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_NUMERICS_FLOAT_VECTORS_INL_H
#undef DEEPTIDE_NUMERICS_FLOAT_VECTORS_INL_H
#else
#define DEEPTIDE_NUMERICS_FLOAT_VECTORS_INL_H
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using D16 = hn::Rebind<uint16_t, D>;
using D32 = hn::RebindToUnsigned<D>;

/// Asks for what a pass over large streams reads some iterations on. Arithmetic between the loads fills the processor's
/// own window, which then reaches no further than the caches; the address may lie past a stream's end.
HWY_INLINE void fetch_ahead(const void* stream) {
  constexpr size_t kBytes = 2048;
  hwy::Prefetch(static_cast<const char*>(stream) + kBytes);
}

HWY_INLINE V load(const float* from) { return hn::LoadU(D(), from); }

HWY_INLINE V load(const c10::BFloat16* from) {
  const auto halves = hn::LoadU(D16(), reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(D32(), halves)));
}

HWY_INLINE V load(const c10::Half* from) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  HWY_ALIGN float lanes[HWY_LANES(float)];
  for (size_t i = 0; i < hn::Lanes(D()); ++i) lanes[i] = static_cast<float>(from[i]);
  return hn::Load(D(), lanes);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(D(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}

/// Rounds to nearest even, as torch does. A NaN becomes the quiet NaN: rounding could carry its bits into Inf.
HWY_INLINE hn::Vec<D16> to_bf16(V x) {
  const auto bits = hn::BitCast(D32(), x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(D32(), 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(D32(), 0x7FFFu))));
  const auto halves = hn::IfThenElse(hn::RebindMask(D32(), hn::IsNaN(x)), hn::Set(D32(), 0x7FC0u), rounded);
  return hn::DemoteTo(D16(), hn::BitCast(hn::RebindToSigned<D>(), halves));
}

HWY_INLINE void store(V x, float* to) { hn::StoreU(x, D(), to); }

HWY_INLINE void store(V x, c10::BFloat16* to) { hn::StoreU(to_bf16(x), D16(), reinterpret_cast<uint16_t*>(to)); }

HWY_INLINE void store(V x, c10::Half* to) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  // Highway's emulation does not round as the hardware does.
  HWY_ALIGN float lanes[HWY_LANES(float)];
  hn::Store(x, D(), lanes);
  for (size_t i = 0; i < hn::Lanes(D()); ++i) to[i] = c10::Half(lanes[i]);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, x), d16, reinterpret_cast<hwy::float16_t*>(to));
#endif
}

/// Writes past the cache: pays for large outputs that are not read soon. `to` is aligned to a vector. The writing
/// thread calls hwy::FlushStream() before it lets others read.
HWY_INLINE void stream(V x, float* to) { hn::Stream(x, D(), to); }
HWY_INLINE void stream(V x, c10::BFloat16* to) { hn::Stream(to_bf16(x), D16(), reinterpret_cast<uint16_t*>(to)); }

/// A whole vector in memory. A loop's body is written once for `Whole` and `Part`, so that tails round as bodies do.
struct Whole {
  template <typename T>
  HWY_INLINE V get(const T* from, float /*fill*/ = 0.0f) const {
    return load(from);
  }
  template <typename T>
  HWY_INLINE void put(V x, T* to) const {
    store(x, to);
  }
  /// The lower 16 bits of each lane.
  HWY_INLINE void put_bits(hn::Vec<D32> bits, uint16_t* to) const {
    hn::StoreU(hn::TruncateTo(D16(), bits), D16(), to);
  }
  /// The lanes in memory, zero elsewhere.
  HWY_INLINE V keep(V x) const { return x; }
};

/// The last `rest` elements of a range, fewer than a vector; lanes beyond them read as `fill` and are not written.
struct Part {
  size_t rest;

  template <typename T>
  HWY_INLINE V get(const T* from, float fill = 0.0f) const {
    HWY_ALIGN T lanes[HWY_LANES(float)];
    store(hn::Set(D(), fill), lanes);
    for (size_t i = 0; i < rest; ++i) lanes[i] = from[i];
    return load(lanes);
  }
  template <typename T>
  HWY_INLINE void put(V x, T* to) const {
    HWY_ALIGN T lanes[HWY_LANES(float)];
    store(x, lanes);
    for (size_t i = 0; i < rest; ++i) to[i] = lanes[i];
  }
  HWY_INLINE void put_bits(hn::Vec<D32> bits, uint16_t* to) const {
    HWY_ALIGN uint16_t lanes[HWY_LANES(float)];
    hn::StoreU(hn::TruncateTo(D16(), bits), D16(), lanes);
    for (size_t i = 0; i < rest; ++i) to[i] = lanes[i];
  }
  HWY_INLINE V keep(V x) const { return hn::IfThenElseZero(hn::FirstN(D(), rest), x); }
};

/// Calls `body(part, i)` for the vectors that cover [begin, end); `part` is a Whole, or a Part for the last.
template <typename Body>
HWY_INLINE void each_vector(size_t begin, size_t end, Body body) {
  const size_t lanes = hn::Lanes(D());
  size_t i = begin;
  for (; i + lanes <= end; i += lanes) body(Whole(), i);
  if (i < end) body(Part{end - i}, i);
}

/// The sum of at most four rows from element `i` on, neighbours first: (0 + 1) + (2 + 3); after `carry` if there is
/// one.
template <int kRows, bool kCarry, typename InMemory, typename T>
HWY_INLINE V add_rows(InMemory part, const T* const* rows, const float* carry, size_t i) {
  static_assert(kRows >= 1 && kRows <= 4);
  const auto row = [&](int index) { return part.get(rows[index] + i); };
  V total = row(0);
  if constexpr (kRows >= 2) total = hn::Add(total, row(1));
  if constexpr (kRows == 3) total = hn::Add(total, row(2));
  if constexpr (kRows == 4) total = hn::Add(total, hn::Add(row(2), row(3)));
  return kCarry ? hn::Add(part.get(carry + i), total) : total;
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
