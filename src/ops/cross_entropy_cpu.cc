// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a row of logits as vector code: its loss and its gradient while the row is in the cache.
#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <vector>

#include "device/parallel.h"
#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// Must follow foreach_target.h, as Highway requires.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "ops/vector.inl"

#ifndef DEEPTIDE_OPS_CROSS_ENTROPY_CPU_ONCE
#define DEEPTIDE_OPS_CROSS_ENTROPY_CPU_ONCE
namespace deeptide::ops {

struct RowTerms {
  size_t classes;
  size_t target;
  float smoothing;
  float scale;  // of the gradient
};

}  // namespace deeptide::ops
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::ops::HWY_NAMESPACE {

struct RowSummary {
  float max;
  float sum;  // of the logits
  bool nan;
};

template <typename T>
RowSummary summarize(const T* row, size_t count) {
  const D d;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  V max = lowest, sum = hn::Zero(d);
  auto nan = hn::IsNaN(sum);
  const auto take = [&](V x) {
    max = hn::Max(max, x);
    nan = hn::Or(nan, hn::IsNaN(x));
  };
  for_vectors(
      count,
      [&](size_t i) {
        const V x = load(row + i);
        take(x);
        sum = hn::Add(sum, x);
      },
      [&](size_t i, size_t rest) {
        take(load_part(row + i, rest, -std::numeric_limits<float>::infinity()));
        sum = hn::Add(sum, load_part(row + i, rest, 0.0f));
      });
  return {hn::GetLane(hn::MaxOfLanes(d, max)), hn::GetLane(hn::SumOfLanes(d, sum)), !hn::AllFalse(d, nan)};
}

/// Returns the sum of exp(x - max) of some elements; writes the powers to `powers` unless it is null.
template <typename T>
float exponentials_block(const T* row, V max, float* powers, size_t count) {
  const D d;
  V sum = hn::Zero(d);
  for_vectors(
      count,
      [&](size_t i) {
        const V power = hn::Exp(d, hn::Sub(load(row + i), max));
        sum = hn::Add(sum, power);
        if (powers != nullptr) store(power, powers + i);
      },
      [&](size_t i, size_t rest) {
        const V x = load_part(row + i, rest, -std::numeric_limits<float>::infinity());
        const V power = hn::Exp(d, hn::Sub(x, max));
        sum = hn::Add(sum, power);
        if (powers != nullptr) store_part(power, powers + i, rest);
      });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// Returns that sum for a row. Blocks are added in fp64: one fp32 sum over a large vocabulary would lose four bits.
template <typename T>
float exponentials(const T* row, float max, float* powers, size_t count) {
  constexpr size_t kBlock = 1024;
  double sum = 0.0;
  for (size_t i = 0; i < count; i += kBlock) {
    float* const to = powers == nullptr ? nullptr : powers + i;
    sum += exponentials_block(row + i, hn::Set(D(), max), to, HWY_MIN(kBlock, count - i));
  }
  return static_cast<float>(sum);
}

/// Writes factor * powers + offset.
template <typename T>
void scale_row(const float* powers, float factor, float offset, T* to, size_t count) {
  const D d;
  const V f = hn::Set(d, factor), o = hn::Set(d, offset);
  for_vectors(
      count, [&](size_t i) { store(hn::MulAdd(load(powers + i), f, o), to + i); },
      [&](size_t i, size_t rest) { store_part(hn::MulAdd(load_part(powers + i, rest, 0.0f), f, o), to + i, rest); });
}

template <typename T>
float row_loss(const T* row, T* gradient, float* powers, const RowTerms& terms) {
  const size_t count = terms.classes;
  const RowSummary summary = summarize(row, count);
  if (summary.nan || !std::isfinite(summary.max)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (gradient != nullptr) {
      for (size_t i = 0; i < count; ++i) powers[i] = nan;
      scale_row(powers, 1.0f, 0.0f, gradient, count);
    }
    return nan;
  }
  const float chosen = hn::GetLane(load_part(row + terms.target, 1, 0.0f));
  const float sum = exponentials(row, summary.max, gradient == nullptr ? nullptr : powers, count);
  const double log_sum = static_cast<double>(summary.max) + std::log(static_cast<double>(sum));
  double loss = (1.0 - terms.smoothing) * (log_sum - chosen);
  if (terms.smoothing != 0.0f) loss += terms.smoothing * (log_sum - static_cast<double>(summary.sum) / count);
  if (gradient != nullptr) {
    const float even = terms.smoothing / static_cast<float>(count);
    const float at_target = terms.scale * (powers[terms.target] / sum - (1.0f - terms.smoothing) - even);
    scale_row(powers, terms.scale / sum, -terms.scale * even, gradient, count);
    store_part(hn::Set(D(), at_target), gradient + terms.target, 1);
  }
  return static_cast<float>(loss);
}

/// An fp32 row's powers may take its gradient's place, even over the logits; a bf16 row's powers need `scratch`.
float row_fp32(const float* row, float* gradient, float*, const RowTerms& terms) {
  return row_loss(row, gradient, gradient, terms);
}
float row_bf16(const uint16_t* row, uint16_t* gradient, float* scratch, const RowTerms& terms) {
  return row_loss(row, gradient, scratch, terms);
}

}  // namespace deeptide::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::ops {
namespace {

using at::Tensor;

HWY_EXPORT(row_fp32);
HWY_EXPORT(row_bf16);

struct Rows {
  const int64_t* targets;
  float* losses;
  CrossEntropyTerms terms;
  int64_t classes;
};

template <typename T, typename Kernel>
void each_row(const Rows& rows, const T* logits, T* gradient, int64_t begin, int64_t end, Kernel kernel) {
  const size_t classes = rows.classes;
  std::vector<float> scratch(sizeof(T) < sizeof(float) && gradient != nullptr ? classes : 0);
  for (int64_t n = begin; n < end; ++n) {
    T* to = gradient == nullptr ? nullptr : gradient + n * classes;
    if (rows.targets[n] == rows.terms.ignore_index) {
      rows.losses[n] = 0.0f;
      if (to != nullptr) std::fill_n(to, classes, T{});
      continue;
    }
    const RowTerms terms{classes, static_cast<size_t>(rows.targets[n]), static_cast<float>(rows.terms.label_smoothing),
                         static_cast<float>(rows.terms.gradient_scale)};
    rows.losses[n] = kernel(logits + n * classes, to, scratch.data(), terms);
  }
}

}  // namespace

void cross_entropy_cpu(const Tensor& logits_NV, const Tensor& targets_N, const CrossEntropyTerms& terms,
                       const Tensor& losses_N, const Tensor& gradient_NV) {
  const Rows rows{targets_N.const_data_ptr<int64_t>(), losses_N.mutable_data_ptr<float>(), terms, logits_NV.size(1)};
  const void* logits = logits_NV.const_data_ptr();
  void* gradient = gradient_NV.defined() ? gradient_NV.mutable_data_ptr() : nullptr;
  const bool fp32 = logits_NV.scalar_type() == at::kFloat;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, rows.classes));
  parallel_blocks(logits_NV.size(0), 1, grain, [&](int64_t begin, int64_t end) {
    if (fp32) {
      each_row(rows, static_cast<const float*>(logits), static_cast<float*>(gradient), begin, end,
               HWY_DYNAMIC_DISPATCH(row_fp32));
    } else {
      each_row(rows, static_cast<const uint16_t*>(logits), static_cast<uint16_t*>(gradient), begin, end,
               HWY_DYNAMIC_DISPATCH(row_bf16));
    }
  });
}

}  // namespace deeptide::ops
#endif  // HWY_ONCE
