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
#define HWY_TARGET_INCLUDE "ops/losses/cross_entropy_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// Must follow foreach_target.h, as Highway requires.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

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
using namespace numerics::HWY_NAMESPACE;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct RowSummary {
  float max;
  float sum;  // of the logits
  bool nan;
};

template <typename T>
RowSummary summarize(const T* row, size_t count) {
  const D d;
  V max = hn::Set(d, kLowest), sum = hn::Zero(d);
  auto nan = hn::IsNaN(sum);
  each_vector(0, count, [&](auto part, size_t i) {
    const V x = part.get(row + i, kLowest);
    max = hn::Max(max, x);
    nan = hn::Or(nan, hn::IsNaN(x));
    sum = hn::Add(sum, part.keep(x));
  });
  return {hn::GetLane(hn::MaxOfLanes(d, max)), hn::GetLane(hn::SumOfLanes(d, sum)), !hn::AllFalse(d, nan)};
}

/// Returns the sum of exp(x - max) of some elements; writes the powers to `powers` unless it is null.
template <typename T>
float exponentials_block(const T* row, V max, float* powers, size_t count) {
  const D d;
  V sum = hn::Zero(d);
  each_vector(0, count, [&](auto part, size_t i) {
    const V power = hn::Exp(d, hn::Sub(part.get(row + i, kLowest), max));
    sum = hn::Add(sum, power);
    if (powers != nullptr) part.put(power, powers + i);
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
  each_vector(0, count, [&](auto part, size_t i) { part.put(hn::MulAdd(part.get(powers + i), f, o), to + i); });
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
  const float chosen = static_cast<float>(row[terms.target]);
  const float sum = exponentials(row, summary.max, gradient == nullptr ? nullptr : powers, count);
  const double log_sum = static_cast<double>(summary.max) + std::log(static_cast<double>(sum));
  double loss = (1.0 - terms.smoothing) * (log_sum - chosen);
  if (terms.smoothing != 0.0f)
    loss += terms.smoothing * (log_sum - static_cast<double>(summary.sum) / static_cast<double>(count));
  if (gradient != nullptr) {
    const float even = terms.smoothing / static_cast<float>(count);
    const float at_target = terms.scale * (powers[terms.target] / sum - (1.0f - terms.smoothing) - even);
    scale_row(powers, terms.scale / sum, -terms.scale * even, gradient, count);
    Part{1}.put(hn::Set(D(), at_target), gradient + terms.target);
  }
  return static_cast<float>(loss);
}

/// An fp32 row's powers may take its gradient's place, even over the logits; a bf16 row's powers need `scratch`.
float row_fp32(const float* row, float* gradient, float*, const RowTerms& terms) {
  return row_loss(row, gradient, gradient, terms);
}
float row_bf16(const c10::BFloat16* row, c10::BFloat16* gradient, float* scratch, const RowTerms& terms) {
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
      each_row(rows, static_cast<const c10::BFloat16*>(logits), static_cast<c10::BFloat16*>(gradient), begin, end,
               HWY_DYNAMIC_DISPATCH(row_bf16));
    }
  });
}

}  // namespace deeptide::ops
#endif  // HWY_ONCE
