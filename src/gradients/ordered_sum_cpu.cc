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
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

#ifndef DEEPTIDE_ORDERED_SUM_CPU_ONCE
#define DEEPTIDE_ORDERED_SUM_CPU_ONCE
namespace deeptide::gradients::detail {

constexpr int64_t kBlock = 4096;     // elements: 16 KiB of sums, which stay in the first-level cache
constexpr size_t kSquareLanes = 32;  // element i of a block belongs to lane i % 32

struct Rows {
  const void* first;
  at::ScalarType dtype;
  int64_t count;
  int64_t stride;  // elements
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

/// sum = (kFirst ? row[0] : sum + row[0]) + row[1] + …, in that order. Elementwise, so the scalar tail rounds alike.
template <int kRows, bool kFirst, class T>
void add_rows(const T* rows, int64_t stride, float* sum, size_t count) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    V total = load(rows + i);
    if constexpr (!kFirst) total = hn::Add(load(sum + i), total);
    for (int row = 1; row < kRows; ++row) total = hn::Add(total, load(rows + row * stride + i));
    hn::StoreU(total, D(), sum + i);
  }
  for (; i < count; ++i) {
    float total = static_cast<float>(rows[i]);
    if constexpr (!kFirst) total = sum[i] + total;
    for (int row = 1; row < kRows; ++row) total += static_cast<float>(rows[row * stride + i]);
    sum[i] = total;
  }
}

template <bool kFirst, class T>
void add_some_rows(int64_t num_rows, const T* rows, int64_t stride, float* sum, size_t count) {
  switch (num_rows) {
    case 1:
      return add_rows<1, kFirst>(rows, stride, sum, count);
    case 2:
      return add_rows<2, kFirst>(rows, stride, sum, count);
    case 3:
      return add_rows<3, kFirst>(rows, stride, sum, count);
    default:
      return add_rows<4, kFirst>(rows, stride, sum, count);
  }
}

/// Four rows a pass: few enough streams for the prefetchers however many ranks there are.
template <class T>
void sum_rows(const T* rows, int64_t num_rows, int64_t stride, float* sum, size_t count) {
  add_some_rows<true>(std::min<int64_t>(num_rows, 4), rows, stride, sum, count);
  for (int64_t row = 4; row < num_rows; row += 4) {
    add_some_rows<false>(std::min<int64_t>(num_rows - row, 4), rows + row * stride, stride, sum, count);
  }
}

template <bool kOverwrite>
void finish_sums(const float* sum, float scale, float* accumulator, size_t count) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    V value = hn::Mul(load(sum + i), hn::Set(D(), scale));
    if constexpr (!kOverwrite) value = hn::Add(load(accumulator + i), value);
    hn::StoreU(value, D(), accumulator + i);
  }
  for (; i < count; ++i) {
    const float value = sum[i] * scale;
    accumulator[i] = kOverwrite ? value : accumulator[i] + value;
  }
}

/// A float's square is exact in double, so only the order of the additions rounds: lane by lane, then lane 0 to 31.
double sum_squares(const float* x, size_t count) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const size_t lanes = hn::Lanes(d);
  HWY_ALIGN double sums[kSquareLanes];
  const size_t whole = count - count % kSquareLanes;
  for (size_t lane = 0; lane < kSquareLanes; lane += 4 * lanes) {
    auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    for (size_t i = lane; i < whole; i += kSquareLanes) {
      const auto x0 = hn::PromoteTo(d, hn::LoadU(df, x + i));
      const auto x1 = hn::PromoteTo(d, hn::LoadU(df, x + i + lanes));
      const auto x2 = hn::PromoteTo(d, hn::LoadU(df, x + i + 2 * lanes));
      const auto x3 = hn::PromoteTo(d, hn::LoadU(df, x + i + 3 * lanes));
      sum0 = hn::MulAdd(x0, x0, sum0);
      sum1 = hn::MulAdd(x1, x1, sum1);
      sum2 = hn::MulAdd(x2, x2, sum2);
      sum3 = hn::MulAdd(x3, x3, sum3);
    }
    hn::StoreU(sum0, d, sums + lane);
    hn::StoreU(sum1, d, sums + lane + lanes);
    hn::StoreU(sum2, d, sums + lane + 2 * lanes);
    hn::StoreU(sum3, d, sums + lane + 3 * lanes);
  }
  for (size_t i = whole; i < count; ++i) sums[i - whole] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

template <class T>
double reduce_typed(const Rows& rows, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  HWY_ALIGN float sum[kBlock];
  sum_rows(static_cast<const T*>(rows.first) + begin, rows.count, rows.stride, sum, count);
  finish.overwrite ? finish_sums<true>(sum, finish.scale, accumulator + begin, count)
                   : finish_sums<false>(sum, finish.scale, accumulator + begin, count);
  return sum_squares(accumulator + begin, count);
}

double reduce_block(const Rows& rows, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  if (rows.dtype == at::kFloat) return reduce_typed<float>(rows, begin, count, finish, accumulator);
  if (rows.dtype == at::kHalf) return reduce_typed<c10::Half>(rows, begin, count, finish, accumulator);
  return reduce_typed<c10::BFloat16>(rows, begin, count, finish, accumulator);
}

void add_widened(const void* from, at::ScalarType dtype, int64_t begin, size_t count, float* accumulator) {
  if (dtype == at::kHalf) {
    add_rows<1, false>(static_cast<const c10::Half*>(from) + begin, 0, accumulator + begin, count);
  } else {
    add_rows<1, false>(static_cast<const c10::BFloat16*>(from) + begin, 0, accumulator + begin, count);
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

void ordered_sum_cpu(const at::Tensor& contributions, float scale, bool overwrite, const at::Tensor& accumulator,
                     const at::Tensor& sum_of_squares) {
  const Rows rows{contributions.const_data_ptr(), contributions.scalar_type(), contributions.size(0),
                  contributions.stride(0)};
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
