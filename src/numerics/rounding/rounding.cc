// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads of one width, stores of another, compiled once per instruction set.
#include "numerics/rounding/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/rounding/rounding.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "numerics/rounding/float_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {

template <class From, class To>
void convert(const From* from, size_t count, To* to) {
  each_vector(0, count, [&](auto part, size_t i) { part.put(part.get(from + i), to + i); });
}

void widen_bf16(const void* from, size_t count, float* to) {
  convert(static_cast<const c10::BFloat16*>(from), count, to);
}
void widen_fp16(const void* from, size_t count, float* to) { convert(static_cast<const c10::Half*>(from), count, to); }
void round_to_bf16(const float* from, size_t count, void* to) { convert(from, count, static_cast<c10::BFloat16*>(to)); }
void round_to_fp16(const float* from, size_t count, void* to) { convert(from, count, static_cast<c10::Half*>(to)); }

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_fp16);
HWY_EXPORT(round_to_bf16);
HWY_EXPORT(round_to_fp16);

void widen(const void* from, at::ScalarType dtype, int64_t count, float* to) {
  const auto length = static_cast<size_t>(count);
  if (dtype == at::kHalf) return HWY_DYNAMIC_DISPATCH(widen_fp16)(from, length, to);
  HWY_DYNAMIC_DISPATCH(widen_bf16)(from, length, to);
}

void round_to(void* to, at::ScalarType dtype, int64_t count, const float* from) {
  const auto length = static_cast<size_t>(count);
  if (dtype == at::kHalf) return HWY_DYNAMIC_DISPATCH(round_to_fp16)(from, length, to);
  HWY_DYNAMIC_DISPATCH(round_to_bf16)(from, length, to);
}

}  // namespace deeptide::numerics
#endif  // HWY_ONCE
