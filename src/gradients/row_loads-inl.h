// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rows of fp32, bf16 or fp16 as vectors of fp32, and their sum in rank order; included once for each instruction set.
#if defined(DEEPTIDE_GRADIENTS_ROW_LOADS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_GRADIENTS_ROW_LOADS_INL_H
#undef DEEPTIDE_GRADIENTS_ROW_LOADS_INL_H
#else
#define DEEPTIDE_GRADIENTS_ROW_LOADS_INL_H
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace deeptide::gradients::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

HWY_INLINE V load(const float* from) { return hn::LoadU(D(), from); }

HWY_INLINE V load(const c10::BFloat16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  const auto halves = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(D(), hn::ShiftLeft<16>(halves));
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

/// row[0] + row[1] + …, in that order; first after `carry` when there is one.
template <int kRows, bool kCarry, class T>
HWY_INLINE V add_rows_at(const T* const* rows, const float* carry, size_t i) {
  V total = load(rows[0] + i);
  if constexpr (kCarry) total = hn::Add(load(carry + i), total);
  for (int row = 1; row < kRows; ++row) total = hn::Add(total, load(rows[row] + i));
  return total;
}

/// The same for one element; nothing here fuses, so it rounds alike.
template <int kRows, bool kCarry, class T>
HWY_INLINE float add_element_at(const T* const* rows, const float* carry, size_t i) {
  float total = static_cast<float>(rows[0][i]);
  if constexpr (kCarry) total = carry[i] + total;
  for (int row = 1; row < kRows; ++row) total += static_cast<float>(rows[row][i]);
  return total;
}

}  // namespace deeptide::gradients::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
