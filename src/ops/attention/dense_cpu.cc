// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The softmax of attention's scores and its gradient as vector code, a row in the cache at a time, in place.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "device/parallel.h"
#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/dense_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// Must follow foreach_target.h, as Highway requires.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::ops::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;
using c10::BFloat16;

/// Turns a row's first `count` scores into shares. `mask` may be null; `terms` has room for as many fp32 numbers.
void shares_of_row(BFloat16* row, const float* mask, float scale, float* terms, size_t count) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const D d;
  const V factor = hn::Set(d, scale);
  V highest = hn::Set(d, kLowest);
  auto nan = hn::IsNaN(hn::Zero(d));
  each_vector(0, count, [&](auto part, size_t i) {
    V x = hn::Mul(part.get(row + i, kLowest), factor);
    if (mask != nullptr) x = hn::Add(x, part.get(mask + i));
    nan = hn::Or(nan, hn::IsNaN(x));
    highest = hn::Max(highest, x);
    part.put(x, terms + i);
  });
  // Some instruction sets say the lowest finite number of infinities; a row of these alone has the sum 0 below.
  const float most = std::max(hn::GetLane(hn::MaxOfLanes(d, highest)), std::numeric_limits<float>::lowest());
  if (!hn::AllFalse(d, nan) || most == -kLowest) {
    const V none = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
    return each_vector(0, count, [&](auto part, size_t i) { part.put(none, row + i); });
  }
  const V offset = hn::Set(d, most);
  V sum = hn::Zero(d);
  each_vector(0, count, [&](auto part, size_t i) {
    const V power = hn::Exp(d, hn::Sub(part.get(terms + i, kLowest), offset));
    sum = hn::Add(sum, part.keep(power));
    part.put(power, terms + i);
  });
  const float total = hn::GetLane(hn::SumOfLanes(d, sum));
  const V part_of_sum = hn::Set(d, total > 0.0f ? 1.0f / total : 0.0f);
  each_vector(0, count, [&](auto part, size_t i) { part.put(hn::Mul(part.get(terms + i), part_of_sum), row + i); });
}

/// Turns the gradient of a row's shares into that of its scores before they are scaled.
void gradient_of_row(const BFloat16* shares, BFloat16* gradient, float scale, size_t count) {
  const D d;
  V sum = hn::Zero(d);
  each_vector(0, count, [&](auto part, size_t i) {
    sum = hn::MulAdd(part.get(shares + i), part.get(gradient + i), sum);  // beyond a part's end, 0
  });
  const V mean = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum))), factor = hn::Set(d, scale);
  each_vector(0, count, [&](auto part, size_t i) {
    const V change = hn::Sub(part.get(gradient + i), mean);
    part.put(hn::Mul(hn::Mul(part.get(shares + i), factor), change), gradient + i);
  });
}

}  // namespace deeptide::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::ops {
namespace {

using at::Tensor;
using c10::BFloat16;

HWY_EXPORT(shares_of_row);
HWY_EXPORT(gradient_of_row);

constexpr int64_t kGrain = 64;  // rows

/// Columns of row `row` that are not in its future, as torch's is_causal has it.
int64_t columns_of(const AttentionTerms& terms, int64_t row, int64_t columns) {
  return terms.causal ? std::min(row + 1, columns) : columns;
}

}  // namespace

void attention_shares_cpu(const Tensor& scores_PRC, const AttentionTerms& terms, int64_t first_pair) {
  const int64_t rows = scores_PRC.size(1), columns = scores_PRC.size(2);
  auto* const scores = scores_PRC.mutable_data_ptr<BFloat16>();
  const float* const mask = terms.mask_NHRC.defined() ? terms.mask_NHRC.const_data_ptr<float>() : nullptr;
  const auto row_of_mask = [&](int64_t pair, int64_t row) -> const float* {
    if (mask == nullptr) return nullptr;
    const int64_t heads = terms.mask_NHRC.size(1);
    const auto strides = terms.mask_NHRC.strides();
    return mask + pair / heads * strides[0] + pair % heads * strides[1] + row * strides[2];
  };
  parallel_blocks(scores_PRC.size(0) * rows, 1, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> powers(columns);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index % rows, count = columns_of(terms, row, columns);
      BFloat16* const to = scores + index * columns;
      HWY_DYNAMIC_DISPATCH(shares_of_row)
      (to, row_of_mask(first_pair + index / rows, row), static_cast<float>(terms.scale), powers.data(), count);
      std::fill(to + count, to + columns, BFloat16(0.0f));
    }
  });
}

void attention_gradient_cpu(const Tensor& shares_PRC, const Tensor& gradient_PRC, double scale) {
  const int64_t columns = shares_PRC.size(2);
  const auto* const shares = shares_PRC.const_data_ptr<BFloat16>();
  auto* const gradient = gradient_PRC.mutable_data_ptr<BFloat16>();
  parallel_blocks(shares_PRC.size(0) * shares_PRC.size(1), 1, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(gradient_of_row)
      (shares + row * columns, gradient + row * columns, static_cast<float>(scale), columns);
    }
  });
}

}  // namespace deeptide::ops
#endif  // HWY_ONCE
