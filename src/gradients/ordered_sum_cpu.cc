// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ordered sum as one pass of vector code over memory, block by block, compiled once per instruction set.
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "device/parallel.h"
#include "gradients/ordered_sum_detail.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gradients/ordered_sum_cpu.cc"
// Arrays of vectors below: no targets whose vectors have no size at compile time.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

#ifndef DEEPTIDE_ORDERED_SUM_CPU_ONCE
#define DEEPTIDE_ORDERED_SUM_CPU_ONCE
namespace deeptide::gradients::detail {

constexpr int64_t kBlock = 4096;     // elements: 16 KiB of sums, which stay in the first-level cache
constexpr size_t kSquareLanes = 32;  // element i of a block belongs to lane i % 32

struct Rows {
  const void* const* data;  // a row each
  at::ScalarType dtype;
  int64_t count;
};

struct Finish {
  float scale;
  bool overwrite;
};

}  // namespace deeptide::gradients::detail
#endif

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

/// sum = (kCarry ? sum : 0) + the rows.
template <int kRows, bool kCarry, class T>
void add_rows(const T* const* rows, float* sum, size_t count) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(add_rows_at<kRows, kCarry>(rows, sum, i), D(), sum + i);
  }
  for (; i < count; ++i) sum[i] = add_element_at<kRows, kCarry>(rows, sum, i);
}

/// accumulator = (kOverwrite ? 0 : accumulator) + scale * the rows' sum; returns the sum of its squares.
/// A float's square is exact in double, so only the order of the additions rounds: lane by lane, then lane 0 to 31.
template <int kRows, bool kOverwrite, class T>
double finish_rows(const T* const* rows, float scale, float* accumulator, size_t count) {
  const D d;
  const hn::ScalableTag<double> d64;
  const hn::Rebind<float, decltype(d64)> half;
  constexpr size_t kLanes = HWY_LANES(float), kLanes64 = HWY_LANES(double), kVectors64 = kSquareLanes / kLanes64;
  const size_t whole = count - count % kSquareLanes;
  hn::Vec<decltype(d64)> squares[kVectors64];
  for (auto& vector : squares) vector = hn::Zero(d64);
  for (size_t i = 0; i < whole; i += kSquareLanes) {
    for (size_t j = i; j < i + kSquareLanes; j += kLanes) {
      V value = hn::Mul(add_rows_at<kRows, false>(rows, nullptr, j), hn::Set(d, scale));
      if constexpr (!kOverwrite) value = hn::Add(load(accumulator + j), value);
      hn::StoreU(value, d, accumulator + j);
    }
    for (size_t k = 0; k < kVectors64; ++k) {
      const auto value = hn::PromoteTo(d64, hn::LoadU(half, accumulator + i + k * kLanes64));
      squares[k] = hn::MulAdd(value, value, squares[k]);
    }
  }
  HWY_ALIGN double lanes[kSquareLanes];
  for (size_t k = 0; k < kVectors64; ++k) hn::Store(squares[k], d64, lanes + k * kLanes64);
  for (size_t i = whole; i < count; ++i) {
    const float value = add_element_at<kRows, false>(rows, nullptr, i) * scale;
    accumulator[i] = kOverwrite ? value : accumulator[i] + value;
    lanes[i - whole] += static_cast<double>(accumulator[i]) * static_cast<double>(accumulator[i]);
  }
  double total = 0.0;
  for (double lane : lanes) total += lane;
  return total;
}

template <int kRows, class T>
double finish_rows(const T* const* rows, const Finish& finish, float* accumulator, size_t count) {
  return finish.overwrite ? finish_rows<kRows, true>(rows, finish.scale, accumulator, count)
                          : finish_rows<kRows, false>(rows, finish.scale, accumulator, count);
}

/// Beyond four ranks the sum grows in the first-level cache, four rows a pass: few enough streams for the prefetchers.
template <class T>
double finish_many_rows(const T* const* rows, int64_t num_rows, const Finish& finish, float* accumulator,
                        size_t count) {
  HWY_ALIGN float sum[kBlock];
  add_rows<4, false>(rows, sum, count);
  int64_t row = 4;
  for (; row + 4 <= num_rows; row += 4) add_rows<4, true>(rows + row, sum, count);
  for (; row < num_rows; ++row) add_rows<1, true>(rows + row, sum, count);
  const float* summed[] = {sum};
  return finish_rows<1>(summed, finish, accumulator, count);
}

template <class T>
double reduce_typed(const Rows& shape, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  constexpr int64_t kFew = 64;
  const T* few[kFew];
  std::vector<const T*> many(shape.count > kFew ? shape.count : 0);
  const T** rows = shape.count > kFew ? many.data() : few;
  for (int64_t row = 0; row < shape.count; ++row) rows[row] = static_cast<const T*>(shape.data[row]) + begin;
  accumulator += begin;
  switch (shape.count) {
    case 1:
      return finish_rows<1>(rows, finish, accumulator, count);
    case 2:
      return finish_rows<2>(rows, finish, accumulator, count);
    case 3:
      return finish_rows<3>(rows, finish, accumulator, count);
    case 4:
      return finish_rows<4>(rows, finish, accumulator, count);
    default:
      return finish_many_rows(rows, shape.count, finish, accumulator, count);
  }
}

double reduce_block(const Rows& rows, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  if (rows.dtype == at::kFloat) return reduce_typed<float>(rows, begin, count, finish, accumulator);
  if (rows.dtype == at::kHalf) return reduce_typed<c10::Half>(rows, begin, count, finish, accumulator);
  return reduce_typed<c10::BFloat16>(rows, begin, count, finish, accumulator);
}

template <class T>
void add_widened_typed(const void* from, int64_t begin, size_t count, float* accumulator) {
  const T* rows[] = {static_cast<const T*>(from) + begin};
  add_rows<1, true>(rows, accumulator + begin, count);
}

void add_widened(const void* from, at::ScalarType dtype, int64_t begin, size_t count, float* accumulator) {
  if (dtype == at::kHalf) {
    add_widened_typed<c10::Half>(from, begin, count, accumulator);
  } else {
    add_widened_typed<c10::BFloat16>(from, begin, count, accumulator);
  }
}

}  // namespace deeptide::gradients::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::gradients::detail {
namespace {

HWY_EXPORT(reduce_block);
HWY_EXPORT(add_widened);

constexpr int64_t kGrainBlocks = 8;

}  // namespace

void ordered_sum_cpu(at::TensorList tensors, float scale, bool overwrite, const at::Tensor& accumulator,
                     const at::Tensor& sum_of_squares) {
  std::vector<const void*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.const_data_ptr());
  const Rows rows{data.data(), tensors[0].scalar_type(), static_cast<int64_t>(data.size())};
  const Finish finish{scale, overwrite};
  const int64_t numel = accumulator.numel();
  float* out = accumulator.mutable_data_ptr<float>();
  std::vector<double> partial(static_cast<size_t>((numel + kBlock - 1) / kBlock));
  parallel_blocks(numel, kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const size_t count = static_cast<size_t>(std::min(kBlock, end - at));
      partial[static_cast<size_t>(at / kBlock)] = HWY_DYNAMIC_DISPATCH(reduce_block)(rows, at, count, finish, out);
    }
  });
  double total = 0.0;
  for (double block : partial) total += block;
  *sum_of_squares.mutable_data_ptr<double>() = total;
}

void accumulate_cpu(const at::Tensor& gradient, const at::Tensor& accumulator) {
  float* out = accumulator.mutable_data_ptr<float>();
  parallel_blocks(accumulator.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(add_widened)
    (gradient.const_data_ptr(), gradient.scalar_type(), begin, static_cast<size_t>(end - begin), out);
  });
}

}  // namespace deeptide::gradients::detail
#endif
