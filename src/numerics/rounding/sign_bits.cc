// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sixty-four signs at a time: a vector's comparison gives its lanes' bits, and a word of them is stored.
#include "numerics/rounding/sign_bits.h"

#include <algorithm>
#include <cstring>

#include "device/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/rounding/sign_bits.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr size_t kSignsPerWord = 64;
using SignLanes = hn::CappedTag<float, kSignsPerWord>;

/// Stores only the bytes that `count` signs take: the memory behind them is another's.
HWY_INLINE void store_signs(uint64_t word, size_t count, uint8_t* bits) { std::memcpy(bits, &word, (count + 7) / 8); }

HWY_INLINE uint64_t load_signs(const uint8_t* bits, size_t count) {
  uint64_t word = 0;
  std::memcpy(&word, bits, (count + 7) / 8);
  return word;
}

HWY_INLINE hn::Mask<SignLanes> lanes_of(uint64_t word, size_t first) {
  const uint64_t shifted = word >> first;
  uint8_t bytes[sizeof(shifted)];
  std::memcpy(bytes, &shifted, sizeof(shifted));
  return hn::LoadMaskBits(SignLanes(), bytes);
}

HWY_INLINE uint64_t word_of(hn::Mask<SignLanes> lanes, size_t first) {
  uint64_t word = 0;
  uint8_t bytes[sizeof(word)] = {};
  hn::StoreMaskBits(SignLanes(), lanes, bytes);
  std::memcpy(&word, bytes, sizeof(word));
  return word << first;
}

void split_signs(float* values, size_t count, float scale, uint8_t* bits) {
  const SignLanes d;
  const size_t lanes = hn::Lanes(d);
  const auto plus = hn::Set(d, scale), minus = hn::Set(d, -scale);
  for (size_t begin = 0; begin < count; begin += kSignsPerWord) {
    const size_t in_word = std::min(kSignsPerWord, count - begin);
    uint64_t word = 0;
    size_t i = 0;
    for (; i + lanes <= in_word; i += lanes) {
      fetch_ahead(values + begin + i);
      const auto x = hn::LoadU(d, values + begin + i);
      const auto positive = hn::Ge(x, hn::Zero(d));
      word |= word_of(positive, i);
      hn::StoreU(hn::Sub(x, hn::IfThenElse(positive, plus, minus)), d, values + begin + i);
    }
    for (; i < in_word; ++i) {
      float& x = values[begin + i];
      const bool positive = x >= 0.0f;
      word |= static_cast<uint64_t>(positive) << i;
      x -= positive ? scale : -scale;
    }
    store_signs(word, in_word, bits + begin / 8);
  }
}

template <bool kAdd>
HWY_INLINE void join_signs(const uint8_t* bits, size_t count, float scale, float* values) {
  const SignLanes d;
  const size_t lanes = hn::Lanes(d);
  const auto plus = hn::Set(d, scale), minus = hn::Set(d, -scale);
  for (size_t begin = 0; begin < count; begin += kSignsPerWord) {
    const size_t in_word = std::min(kSignsPerWord, count - begin);
    const uint64_t word = load_signs(bits + begin / 8, in_word);
    float* to = values + begin;
    size_t i = 0;
    for (; i + lanes <= in_word; i += lanes) {
      auto x = hn::IfThenElse(lanes_of(word, i), plus, minus);
      fetch_ahead(to + i);
      if constexpr (kAdd) x = hn::Add(hn::LoadU(d, to + i), x);
      hn::StoreU(x, d, to + i);
    }
    for (; i < in_word; ++i) {
      const float x = (word >> i & 1) != 0 ? scale : -scale;
      to[i] = kAdd ? to[i] + x : x;
    }
  }
}

void set_signs(const uint8_t* bits, size_t count, float scale, float* values) {
  join_signs<false>(bits, count, scale, values);
}

void add_signs(const uint8_t* bits, size_t count, float scale, float* values) {
  join_signs<true>(bits, count, scale, values);
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(split_signs);
HWY_EXPORT(set_signs);
HWY_EXPORT(add_signs);

namespace {

using at::Tensor;

constexpr int64_t kSignBlock = 4096;  // elements; a multiple of a word's
constexpr int64_t kSignGrain = 16;    // blocks: 65536 elements move 0.5 MB, which is worth a thread

void check(const char* what, const Tensor& values, const Tensor& scale, const Tensor& bits) {
  const auto fits = [&](const Tensor& tensor, at::ScalarType type, int64_t numel) {
    return tensor.defined() && tensor.scalar_type() == type && tensor.numel() == numel && tensor.is_contiguous() &&
           tensor.device() == values.device();
  };
  TORCH_CHECK_VALUE(values.defined() && fits(values, at::kFloat, values.numel()), what,
                    ": values must be a contiguous fp32 tensor");
  TORCH_CHECK_VALUE(fits(scale, at::kFloat, 1), what, ": the scale must be one fp32 number beside the values");
  TORCH_CHECK_VALUE(fits(bits, at::kByte, sign_bytes(values.numel())), what, ": ", values.numel(), " signs take ",
                    sign_bytes(values.numel()), " bytes (uint8) beside the values");
}

/// Calls `kernel(elements before, count)` for blocks of whole words, on torch's threads.
template <typename Kernel>
void over_words(int64_t numel, const Kernel& kernel) {
  parallel_blocks(numel, kSignBlock, kSignGrain,
                  [&](int64_t begin, int64_t end) { kernel(begin, static_cast<size_t>(end - begin)); });
}

}  // namespace

void split_signs(const Tensor& values, const Tensor& scale, const Tensor& bits) {
  check("split_signs", values, scale, bits);
  if (!values.is_cpu()) return reference::split_signs(values, scale, bits);
  const float factor = *scale.const_data_ptr<float>();
  auto* from = values.mutable_data_ptr<float>();
  auto* to = bits.mutable_data_ptr<uint8_t>();
  over_words(values.numel(), [&](int64_t begin, size_t count) {
    HWY_DYNAMIC_DISPATCH(split_signs)(from + begin, count, factor, to + begin / 8);
  });
}

void set_signs(const Tensor& bits, const Tensor& scale, const Tensor& values) {
  check("set_signs", values, scale, bits);
  if (!values.is_cpu()) return reference::set_signs(bits, scale, values);
  const float factor = *scale.const_data_ptr<float>();
  const auto* from = bits.const_data_ptr<uint8_t>();
  auto* to = values.mutable_data_ptr<float>();
  over_words(values.numel(), [&](int64_t begin, size_t count) {
    HWY_DYNAMIC_DISPATCH(set_signs)(from + begin / 8, count, factor, to + begin);
  });
}

void add_signs(const Tensor& bits, const Tensor& scale, const Tensor& values) {
  check("add_signs", values, scale, bits);
  if (!values.is_cpu()) return reference::add_signs(bits, scale, values);
  const float factor = *scale.const_data_ptr<float>();
  const auto* from = bits.const_data_ptr<uint8_t>();
  auto* to = values.mutable_data_ptr<float>();
  over_words(values.numel(), [&](int64_t begin, size_t count) {
    HWY_DYNAMIC_DISPATCH(add_signs)(from + begin / 8, count, factor, to + begin);
  });
}

}  // namespace deeptide::numerics
#endif  // HWY_ONCE
